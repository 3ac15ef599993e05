//! `xserv_tensor` is DLPack's `DLTensor`: compared with dlpack.h by a C compiler.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the folder that holds `dlpack/dlpack.h`: `DLPACK_INCLUDE`, the package in target/tools,
/// or the system's.
fn include() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let places = [
        std::env::var_os("DLPACK_INCLUDE").map(PathBuf::from),
        Some(root.join("target/tools/dlpack/tvm_ffi/3rdparty/dlpack/include")),
        Some(PathBuf::from("/usr/include")),
        Some(PathBuf::from("/usr/local/include")),
    ];
    places.into_iter().flatten().find(|place| place.join("dlpack/dlpack.h").exists())
}

#[test]
fn the_descriptor_is_dlpacks() {
    let Some(dlpack) = include() else {
        assert!(std::env::var_os("XSERV_REQUIRE_TOOLS").is_none(), "dlpack.h is missing");
        println!("skipped: dlpack.h is not here (set DLPACK_INCLUDE)");
        return;
    };
    let same = |ours: &str, theirs: &str, fields: &[(&str, &str)]| {
        let mut checks =
            format!("_Static_assert(sizeof({ours}) == sizeof({theirs}), \"{ours}\");\n");
        for (our, their) in fields {
            let at = format!("offsetof({ours}, {our}) == offsetof({theirs}, {their})");
            let size = format!("sizeof((({ours} *)0)->{our}) == sizeof((({theirs} *)0)->{their})");
            checks += &format!("_Static_assert({at} && {size}, \"{ours}.{our}\");\n");
        }
        checks
    };
    let names = |names: &[&'static str]| names.iter().map(|&n| (n, n)).collect::<Vec<_>>();
    let tensor = ["data", "device", "ndim", "dtype", "shape", "strides", "byte_offset"];
    let source = [
        "#include <dlpack/dlpack.h>\n#include <stddef.h>\n#include <xserv.h>\n".to_string(),
        same("xserv_tensor", "DLTensor", &names(&tensor)),
        same("xserv_tensor_device", "DLDevice", &names(&["device_type", "device_id"])),
        same("xserv_tensor_dtype", "DLDataType", &names(&["code", "bits", "lanes"])),
        same(
            "xserv_managed_tensor",
            "DLManagedTensor",
            &names(&["dl_tensor", "manager_ctx", "deleter"]),
        ),
        same(
            "xserv_managed_tensor_versioned",
            "DLManagedTensorVersioned",
            &[
                ("version_major", "version.major"),
                ("version_minor", "version.minor"),
                ("manager_ctx", "manager_ctx"),
                ("deleter", "deleter"),
                ("flags", "flags"),
                ("dl_tensor", "dl_tensor"),
            ],
        ),
        "_Static_assert(XSERV_DLPACK_READ_ONLY == DLPACK_FLAG_BITMASK_READ_ONLY, \"\");\n".into(),
        "_Static_assert(XSERV_DLPACK_IS_COPIED == DLPACK_FLAG_BITMASK_IS_COPIED, \"\");\n".into(),
        "_Static_assert(kDLCPU == 1 && kDLCUDA == 2 && kDLCUDAHost == 3 && kDLCUDAManaged == 13, \"\");\n".into(),
        "_Static_assert(kDLInt == 0 && kDLFloat == 2 && kDLBfloat == 4, \"\");\n".into(),
    ]
    .concat();
    let file = std::env::temp_dir().join(format!("xserv-dlpack-{}.c", std::process::id()));
    std::fs::write(&file, source).unwrap();
    let output = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Werror", "-fsyntax-only", "-I"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"))
        .arg("-I")
        .arg(&dlpack)
        .arg(&file)
        .output()
        .unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
