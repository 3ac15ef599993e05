//! Memory comes back: what many loads leave behind, and what works after memory has run out. (That a budget
//! is kept or refused before a weight is read: `plan.rs`.)

use std::process::Command;

use xserv::backend::cuda::CudaDevice;
use xserv::backend::{ComputeContext, ContextBackend};
use xserv::ffi::xserv_device_kind::*;
use xserv::ffi::xserv_status::*;
use xserv::ffi::*;

use crate::client::*;
use crate::cuda::{has_cuda, on_cuda, whole_cuda};

/// Cycles before the first look: pools of the C library, kernels that are loaded once, lazily made statics.
const WARM_UP: usize = 10;
const CYCLES: usize = 100;
/// The allowed growth of the host's memory in all cycles together. A cycle that lost only the
/// tokenizer or the weights of the model (a MB or more) would show many times over; the C library's
/// pools of freed memory, which depend on how threads met, do not.
const HOST_SLACK_BYTES: u64 = 4 << 20;
/// The allowed shrinkage of the device's free memory: drivers hand out memory in steps of 2 MiB.
const DEVICE_SLACK_BYTES: u64 = 4 << 20;

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn free_device_bytes() -> u64 {
    CudaDevice::get(0).unwrap().free_memory_bytes().unwrap() as u64
}

fn some_tokens(model: &Model) -> Outcome<Vec<u32>> {
    let mut request = greedy(&[3, 1, 4, 1, 5, 9], 10);
    request.ignore_eos = 1;
    model.generate(&request).map(|output| output.ids)
}

/// Loads, generates and frees; gives the growth of the host's and of the device's memory.
fn cycles(options: &xserv_load_options, device_bytes: impl Fn() -> u64) -> (u64, u64) {
    let mut expected: Option<Vec<u32>> = None;
    let mut before = (0, 0);
    for cycle in 0..WARM_UP + CYCLES {
        if cycle == WARM_UP {
            before = (resident_bytes(), device_bytes());
        }
        let model = Model::load(&tiny(), options).unwrap();
        let ids = some_tokens(&model).unwrap();
        assert_eq!(expected.get_or_insert(ids.clone()), &ids, "the same run, the same tokens");
    }
    let host = resident_bytes().saturating_sub(before.0);
    (host, before.1.saturating_sub(device_bytes()))
}

/// In a process of its own: the memory of this one belongs to all tests.
fn in_a_child(test: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{errors}");
}

#[test]
fn a_hundred_loads_leave_no_memory_behind() {
    in_a_child("memory::child_cpu");
}

#[test]
#[ignore = "run by another test of this module, as a child process"]
fn child_cpu() {
    let options = xserv_load_options { num_threads: 2, ..load_options() };
    let (host, _) = cycles(&options, || 0);
    println!("{CYCLES} cycles: {host} more bytes of the host");
    assert!(host <= HOST_SLACK_BYTES);
}

#[test]
fn a_hundred_loads_on_cuda_leave_no_memory_behind() {
    if let Some(_device) = whole_cuda() {
        in_a_child("memory::child_cuda");
    }
}

#[test]
#[ignore = "run by another test of this module, as a child process"]
fn child_cuda() {
    if !has_cuda() {
        return;
    }
    // Few threads: the C library keeps some memory for each that ever was.
    let options = xserv_load_options {
        kv_cache_tokens: 8192,
        num_threads: 2,
        ..on_cuda(xserv_dtype::XSERV_DTYPE_AUTO)
    };
    let (host, device) = cycles(&options, free_device_bytes);
    println!("{CYCLES} cycles: {host} more bytes of the host, {device} of the device");
    assert!(host <= HOST_SLACK_BYTES && device <= DEVICE_SLACK_BYTES);
}

/// Loads that fail at each stage leave nothing, and the next one works.
#[test]
fn loads_on_cuda_that_run_out_of_memory_can_be_repeated() {
    let Some(_device) = whole_cuda() else { return };
    let base = on_cuda(xserv_dtype::XSERV_DTYPE_AUTO);
    let found = plan(&tiny(), &base).unwrap();
    // No room for the weights, for one block of the KV cache, for the cache that is asked for.
    let cases = [
        xserv_load_options { max_memory_bytes: found.weights_bytes / 2, ..base },
        xserv_load_options { max_memory_bytes: found.minimum_bytes - 1, ..base },
        xserv_load_options { max_memory_bytes: found.minimum_bytes, kv_cache_tokens: 64, ..base },
        xserv_load_options { kv_cache_tokens: 1 << 31, ..base },
    ];
    for options in cases {
        let failure = Model::load(&tiny(), &options).err().unwrap();
        assert_eq!(failure.status, XSERV_STATUS_OUT_OF_MEMORY, "{failure:?}");
        let size = found.weights_bytes.to_string();
        assert!(failure.message.contains(&size), "{failure:?} does not name {size} bytes");
        let least = xserv_load_options { max_memory_bytes: found.minimum_bytes, ..base };
        let model = Model::load(&tiny(), &least).unwrap();
        assert_eq!(model.info().kv_cache_tokens, 32);
        assert_eq!(some_tokens(&model).unwrap().len(), 10);
    }
}

/// Another program takes the rest of the device's memory while the model runs.
#[test]
#[ignore = "run by another test of this module, as a child process"]
fn child_full_device() {
    if !has_cuda() {
        return;
    }
    let options =
        xserv_load_options { kv_cache_tokens: 2048, ..on_cuda(xserv_dtype::XSERV_DTYPE_AUTO) };
    let model = Model::load(&tiny(), &options).unwrap();
    let context = ComputeContext::cuda_private(0, usize::MAX).unwrap();
    assert!(matches!(context.backend(), ContextBackend::Cuda(_)));
    let (mut taken, mut step) = (Vec::new(), 1usize << 36);
    while step >= 1 << 16 {
        match context.allocate_exact(step, "the rest") {
            Ok(block) => taken.push(block),
            Err(_) => step /= 2,
        }
    }
    let long: Vec<u32> = (0..1500).map(|i| i % 2000).collect();
    for ids in [&[3, 1, 4][..], &long] {
        let mut request = greedy(ids, 10);
        request.ignore_eos = 1;
        match model.generate(&request) {
            // All that the model needs may have been there before.
            Ok(output) => assert_eq!(output.ids.len(), 10),
            Err(failure) => {
                println!("{}", failure.message);
                assert_eq!(failure.status, XSERV_STATUS_OUT_OF_MEMORY, "{failure:?}");
                assert!(failure.message.contains("bytes"), "{failure:?}");
            }
        }
    }
    drop(taken);
    context.trim();
    assert_eq!(some_tokens(&model).unwrap().len(), 10);
    let on_cpu = xserv_load_options { device_kind: XSERV_DEVICE_CPU as u32, ..load_options() };
    Model::load(&tiny(), &on_cpu).unwrap();
}

#[test]
fn a_full_device_ends_a_request_and_not_the_model() {
    if let Some(_device) = whole_cuda() {
        in_a_child("memory::child_full_device");
    }
}
