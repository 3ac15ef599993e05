//! Normalisations over tensors, against f64.

use super::support::tensors::*;
use super::support::Random;
use xserv::ffi::*;

fn rms_norm_reference(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    x.chunks_exact(weight.len())
        .flat_map(|row| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            let scale = 1.0 / (mean + eps).sqrt();
            row.iter().zip(weight).map(move |(x, w)| x * scale * w).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn rms_norm() {
    let mut random = Random::new(1);
    for context in contexts() {
        for element in FLOATS {
            for (rows, width) in [(1, 1), (3, 7), (1, 4096), (5, 33), (2, 8192), (33, 128), (0, 16)]
            {
                let what = format!("rms_norm {element:?} {rows}x{width} on {}", context.name);
                let x = element.round_all(&random.normals(rows * width));
                let weight = element.round_all(&random.normals(width));
                let shape = [rows as i64, width as i64];
                let x_tensor = TestTensor::new(&context, element, &shape, &x);
                let weight_tensor = TestTensor::new(&context, element, &shape[1..], &weight);
                let out = TestTensor::blank(&context, element, &shape);
                // SAFETY: live tensors of the context.
                unsafe {
                    ok(xserv_op_rms_norm(
                        context.handle,
                        &x_tensor.view(),
                        &weight_tensor.view(),
                        1e-6,
                        &out.view(),
                    ));
                }
                let want = rms_norm_reference(&x, &weight, f64::from(1e-6f32));
                let bar = element.bar(1e-5, 1e-3, 8e-3);
                compare(&what, &out.read(&what), &want, bar);
                assert_eq!(x_tensor.read(&what), x, "{what}: the input was changed");
            }
        }
    }
}
