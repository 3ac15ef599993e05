//! The check of gradients, and by it the gradients of the matrix product.

use super::support::tensors::*;
use super::support::Random;
use std::ffi::c_void;
use xserv::ffi::*;

fn result() -> xserv_grad_check_result {
    // SAFETY: numbers.
    let mut result: xserv_grad_check_result = unsafe { std::mem::zeroed() };
    result.struct_size = size_of::<xserv_grad_check_result>();
    result
}

fn options() -> xserv_grad_check_options {
    // SAFETY: filled by the call.
    unsafe {
        let mut options = std::mem::zeroed();
        xserv_grad_check_options_init(&mut options, size_of_val(&options));
        options
    }
}

/// Calls the boxed closure behind user_data.
unsafe extern "C" fn call<F: FnMut(&[f32]) -> Option<f64>>(
    values: *const f32,
    count: usize,
    loss: *mut f64,
    user_data: *mut c_void,
) -> bool {
    // SAFETY: as `check` passes them.
    unsafe {
        let values = if count == 0 { &[] } else { std::slice::from_raw_parts(values, count) };
        match (*user_data.cast::<F>())(values) {
            Some(value) => {
                *loss = value;
                true
            }
            None => false,
        }
    }
}

fn check<F: FnMut(&[f32]) -> Option<f64>>(
    options: Option<&xserv_grad_check_options>,
    values: &[f32],
    gradient: &[f32],
    mut loss: F,
    result: &mut xserv_grad_check_result,
) -> xserv_status {
    assert_eq!(values.len(), gradient.len());
    // SAFETY: arrays of that length, and a callback for F.
    unsafe {
        xserv_grad_check(
            options.map_or(std::ptr::null(), std::ptr::from_ref),
            Some(call::<F>),
            (&raw mut loss).cast(),
            values.as_ptr(),
            gradient.as_ptr(),
            values.len(),
            result,
        )
    }
}

fn cubes(values: &[f32]) -> Option<f64> {
    Some(values.iter().map(|&x| f64::from(x).powi(3)).sum())
}

#[test]
fn right_and_wrong_gradients() {
    let values: Vec<f32> = (0..50).map(|i| i as f32 / 10.0 - 2.5).collect();
    let gradient: Vec<f32> = values.iter().map(|x| 3.0 * x * x).collect();
    let mut found = result();
    let mut calls = 0;
    ok(check(
        None,
        &values,
        &gradient,
        |moved| {
            calls += 1;
            let differing = moved.iter().zip(&values).filter(|(m, v)| m != v).count();
            assert_eq!(differing, 1, "one value moves at a time");
            cubes(moved)
        },
        &mut found,
    ));
    assert_eq!(calls, 100);
    assert_eq!((found.passed, found.num_failed), (1, 0));
    assert!(found.worst_error < 1e-4, "{found:?}");

    // Two wrong elements; the second is further off for its size.
    let mut wrong = gradient.clone();
    wrong[7] *= 1.1;
    wrong[31] *= -1.0;
    ok(check(None, &values, &wrong, cubes, &mut found));
    assert_eq!((found.passed, found.num_failed, found.worst_index), (0, 2, 31));
    assert_eq!(found.worst_analytic, f64::from(wrong[31]));
    assert!((found.worst_numeric - f64::from(gradient[31])).abs() < 1e-4, "{found:?}");
    assert!((found.worst_error - 2.0 * f64::from(gradient[31])).abs() < 1e-3, "{found:?}");

    // The same gradient within wide tolerances.
    let wide = xserv_grad_check_options { rel_tol: 2.5, ..options() };
    ok(check(Some(&wide), &values, &wrong, cubes, &mut found));
    assert_eq!(found.passed, 1);

    ok(check(None, &[], &[], |_| panic!("never called"), &mut found));
    assert_eq!((found.passed, found.num_failed, found.worst_index), (1, 0, 0));
}

#[test]
fn what_is_not_finite_fails() {
    let values = [1.0f32, 2.0, 3.0];
    let mut found = result();
    // Above 2, the loss of the second value is infinite.
    let loss = |v: &[f32]| Some(if v[1] > 2.0 { f64::INFINITY } else { 0.0 });
    ok(check(None, &values, &[0.0; 3], loss, &mut found));
    assert_eq!((found.passed, found.num_failed, found.worst_index), (0, 1, 1));
    assert_eq!(found.worst_error, f64::INFINITY);
    ok(check(None, &values, &[0.0, 0.0, f32::NAN], |_| Some(0.0), &mut found));
    assert_eq!((found.num_failed, found.worst_index), (1, 2));
    ok(check(None, &values, &[0.0; 3], |_| Some(f64::NAN), &mut found));
    assert_eq!((found.num_failed, found.worst_index), (3, 0));
    // No step of 1e-3 can be seen at 1e8.
    ok(check(None, &[1e8], &[1.0], |v| Some(v[0].into()), &mut found));
    assert_eq!(found.num_failed, 1);
}

#[test]
fn cancellation_and_refusals() {
    let values = [1.0f32; 8];
    let mut found = xserv_grad_check_result { num_failed: 77, ..result() };
    let mut calls = 0;
    let status = check(
        None,
        &values,
        &[0.0; 8],
        |_| {
            calls += 1;
            (calls < 5).then_some(0.0)
        },
        &mut found,
    );
    assert_eq!((status, calls), (xserv_status::XSERV_STATUS_CANCELLED, 5));
    assert_eq!(found.num_failed, 77, "the result of a call that failed was written");

    let never = |_: &[f32]| -> Option<f64> { panic!("never called") };
    for (options, said) in [
        (xserv_grad_check_options { eps: 0.0, ..options() }, "eps is 0"),
        (xserv_grad_check_options { eps: f64::NAN, ..options() }, "eps is NaN"),
        (xserv_grad_check_options { rel_tol: -1.0, ..options() }, "rel_tol is -1"),
        (xserv_grad_check_options { atol: f64::INFINITY, ..options() }, "atol is inf"),
        (xserv_grad_check_options { struct_size: 9, ..options() }, "struct_size is 9"),
    ] {
        let message = refused(check(Some(&options), &values, &[0.0; 8], never, &mut found));
        assert!(message.contains(said), "{message}");
    }
    let mut small = xserv_grad_check_result { struct_size: 3, ..result() };
    assert!(
        refused(check(None, &values, &[0.0; 8], never, &mut small)).contains("struct_size is 3")
    );
    // SAFETY: NULL is refused before anything is read.
    unsafe {
        let (null, nothing) = (std::ptr::null(), std::ptr::null_mut());
        let data = values.as_ptr();
        let status = xserv_grad_check(null, None, nothing, data, data, 8, &mut found);
        assert!(refused(status).contains("loss is NULL"));
        let loss: xserv_loss_callback = Some(call::<fn(&[f32]) -> Option<f64>>);
        let status = xserv_grad_check(null, loss, nothing, std::ptr::null(), data, 8, &mut found);
        assert!(refused(status).contains("values is NULL"));
        let status = xserv_grad_check(null, loss, nothing, data, data, 8, std::ptr::null_mut());
        assert!(refused(status).contains("result is NULL"));
    }
}

/// The loss is the sum of C weighted with dC, so that its gradients are those of the product. The
/// callback calls the library, from inside a call of the library.
#[test]
fn gradients_of_a_product() {
    for context in contexts() {
        let mut random = Random::new(80);
        let (m, n, k) = (5, 7, 6);
        let (a, b, dc) = (random.normals(m * k), random.normals(k * n), random.normals(m * n));
        let tensor = |shape: [usize; 2], values: &[f32]| {
            let values: Vec<f64> = values.iter().map(|&x| x.into()).collect();
            TestTensor::new(&context, Type::F32, &shape.map(|n| n as i64), &values)
        };
        let loss = |a: &[f32], b: &[f32]| {
            let (a, b) = (tensor([m, k], a), tensor([k, n], b));
            let c = TestTensor::blank(&context, Type::F32, &[m as i64, n as i64]);
            // SAFETY: live tensors of the context.
            let status = unsafe {
                let options = std::ptr::null();
                xserv_op_gemm(context.handle, options, &a.view(), &b.view(), &c.view())
            };
            ok(status);
            let c = c.read("c");
            Some(c.iter().zip(&dc).map(|(&c, &d)| c * f64::from(d)).sum())
        };
        // The loss is linear in each value: a large step keeps the rounding of the f32 sums small.
        let options = xserv_grad_check_options { eps: 0.125, ..options() };
        for transpose_kernels in 0..2 {
            let da = TestTensor::blank(&context, Type::F32, &[m as i64, k as i64]);
            let db = TestTensor::blank(&context, Type::F32, &[k as i64, n as i64]);
            // SAFETY: live tensors of the context.
            unsafe {
                ok(xserv_op_gemm_backward(
                    context.handle,
                    &tensor([m, k], &a).view(),
                    &tensor([k, n], &b).view(),
                    &tensor([m, n], &dc).view(),
                    transpose_kernels,
                    &da.view(),
                    &db.view(),
                ));
            }
            let read = |x: &TestTensor| x.read("x").iter().map(|&x| x as f32).collect::<Vec<_>>();
            let (da, db) = (read(&da), read(&db));
            let mut found = result();
            ok(check(Some(&options), &a, &da, |a| loss(a, &b), &mut found));
            assert_eq!(found.passed, 1, "da: {found:?}");
            ok(check(Some(&options), &b, &db, |b| loss(&a, b), &mut found));
            assert_eq!(found.passed, 1, "db: {found:?}");
            let mut wrong = db.clone();
            wrong[17] += 1.0;
            ok(check(Some(&options), &b, &wrong, |b| loss(&a, b), &mut found));
            assert_eq!((found.num_failed, found.worst_index), (1, 17), "{found:?}");
        }
    }
}
