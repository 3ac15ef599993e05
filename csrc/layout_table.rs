//! The part of the build script that hands the layouts of `csrc/common/layouts.cuh` to Rust, whose
//! structs are compared with them when they are compiled.

use std::fmt::Write as _;
use std::path::Path;

/// Returns the macro `committed!`, which gives the size of a struct, or the offset of a field of a
/// struct, each as `Some`. With `bless` it gives `None` for everything, so that a new layout compiles
/// and can be written.
pub fn macro_of(header: &Path, bless: bool) -> String {
    let text =
        std::fs::read_to_string(header).unwrap_or_else(|e| panic!("{}: {e}", header.display()));
    let mut arms = String::new();
    for line in text.lines().filter(|_| !bless) {
        let line = line.trim();
        if let Some((name, rest)) =
            line.strip_prefix("static_assert(sizeof(").and_then(|rest| rest.split_once(") == "))
        {
            let bytes = rest.split(',').next().unwrap_or_default();
            let _ = writeln!(arms, "    ({name}) => {{ Some({bytes}usize) }};");
        } else if let Some(rest) = line.strip_prefix("XSERV_FIELD(") {
            if let [name, field, offset, _] = rest.split(", ").collect::<Vec<_>>().as_slice() {
                let _ = writeln!(arms, "    ({name} {field}) => {{ Some({offset}usize) }};");
            }
        }
    }
    // A struct that the header lacks has no layout there.
    let other = if bless { "None" } else { "Some(usize::MAX)" };
    format!("macro_rules! committed {{\n{arms}    ($($any:ident)+) => {{ {other} }};\n}}\n")
}
