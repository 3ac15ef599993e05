# Shared by the scripts that make wheels and tarballs. Sourced by them, after setting `me` to their name; stops with a
# sentence. It moves to the root of the repository.
#
# A library that is passed on must run with an older C library than this machine's. Zig links against the symbols
# of any version of it; cargo-zigbuild has Cargo use Zig. Both are installed from the Python package index, without
# root, into target/tools. Where that can't be done, Cargo links as usual, and the wheel's name says what C library
# it needs in consequence.

# The oldest that Rust's standard library runs with.
oldest_glibc=2.17
cargo_zigbuild_version=0.24.0
zig_version=0.17.1

repository=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$repository/tests/support/tools.sh"
fail() { echo "$me: $*" >&2; exit 1; }
started_in=$PWD
cd "$repository"
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
# Files made from the same commit are the same.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2> /dev/null || date +%s)}

# usage: prints the comment at the beginning of the script.
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }

# options NAMES ARGUMENTS...: sets a variable for each `--name value`; the paths of `library` and `out` become absolute.
options() {
  local known=$1 name value
  shift
  while [ $# -gt 0 ]; do
    name=${1#--}
    case "$1" in --help | -h) usage; exit 0 ;; esac
    case " $known " in *" $name "*) ;; *) echo "$me: unknown argument $1" >&2; usage >&2; exit 2 ;; esac
    [ $# -ge 2 ] || { echo "$me: $1 needs a value" >&2; exit 2; }
    value=$2
    case "$name:$value" in
      library:/* | out:/*) ;;
      library:* | out:*) value=$started_in/$value ;;
    esac
    declare -g "$name=$value"
    shift 2
  done
}

find_zigbuild() {
  zigbuild=$tools_folder/zigbuild
  [ -x "$zigbuild/bin/cargo-zigbuild" ] && [ -x "$zigbuild/ziglang/zig" ] && return
  tools_say "Installing cargo-zigbuild $cargo_zigbuild_version and Zig $zig_version into target/tools"
  rm -rf "$zigbuild"
  mkdir -p "$tools_folder"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --target "$zigbuild" \
    "cargo-zigbuild==$cargo_zigbuild_version" "ziglang==$zig_version" > "$tools_folder/zigbuild.log" 2>&1
}

# Sets `library` to a libxserv.so that is built now; `build_library static` makes the static library beside it, and has
# CC compile programs for the same C library. `build_library "" TRIPLE` builds for another machine.
build_library() {
  find_cargo
  local target=${CARGO_TARGET_DIR:-$repository/target} triple host folder
  host=$(rustc -vV | sed -n 's/^host: //p')
  triple=${2:-$host}
  case "$triple" in *-linux-gnu) ;; *) fail "wheels and tarballs are made on Linux with glibc, not on $triple" ;; esac
  if find_zigbuild; then
    # Kernels that cargo build has compiled for this machine need not be compiled again.
    mkdir -p "$target/kernels" "$target/$triple"
    [ -e "$target/$triple/kernels" ] || ln -s ../kernels "$target/$triple/kernels"
    # It would prefer the Zig of a Python that has one.
    CARGO_ZIGBUILD_PYTHON_PATH=false CARGO_ZIGBUILD_ZIG_PATH=$repository/csrc/packaging/zig \
      "$zigbuild/bin/cargo-zigbuild" zigbuild --release --locked --lib --target "$triple.$oldest_glibc" --target-dir "$target" >&2
    folder=$target/$triple/release
    [ "${1:-}" != static ] || csrc/packaging/static "$folder" "$folder/libxserv.a" --target "$triple" >&2
    printf '#!/bin/sh\nexec "%s" cc -fno-sanitize=all -target %s "$@"\n' "$zigbuild/ziglang/zig" \
      "${triple/-unknown/}.$oldest_glibc" > "$zigbuild/cc"
    chmod +x "$zigbuild/cc"
    export CC=$zigbuild/cc
  elif [ "$triple" != "$host" ]; then
    fail "Zig can't be installed (see target/tools/zigbuild.log), which links for other machines"
  else
    tools_say "Zig can't be installed (see target/tools/zigbuild.log): the library will need the C library of this machine."
    env -u CARGO_BUILD_TARGET cargo build --release --locked --lib --target-dir "$target" >&2
    folder=$target/release
    [ "${1:-}" != static ] || csrc/packaging/static "$folder" "$folder/libxserv.a" >&2
  fi
  library=$folder/libxserv.so
}

# Stops unless the library is of this version, exports what the headers declare and nothing else, and keeps
# clear of what src/thread_exit.rs replaces.
check_library() {
  [ -f "$library" ] || fail "there is no file $library"
  local declared exported found
  declared=$(sed -e 's:^ *\*.*::' -e 's:^ */\*.*::' include/xserv.h include/xserv_ops.h |
    grep -v "^static inline" | grep -o '\bxserv_[a-z0-9_]*(' | tr -d '(' | sort -u)
  exported=$(nm -D --defined-only "$library" | awk '{ print $3 }' | sort -u)
  [ "$declared" = "$exported" ] ||
    fail "$library does not export what the headers declare:"$'\n'"$(diff <(echo "$declared") <(echo "$exported"))"
  if nm -D --undefined-only "$library" | grep -q __cxa_thread_atexit_impl; then
    fail "$library uses __cxa_thread_atexit_impl, which ends the process where memory is short"
  fi
  # The ELF header's machine; a library for another one can't be asked.
  [ "$(od -An -tx1 -j18 -N2 "$library")" = "$(od -An -tx1 -j18 -N2 "$(readlink -f "$(command -v python3)")")" ] || return 0
  found=$(python3 -c 'import ctypes, sys
version = ctypes.CDLL(sys.argv[1]).xserv_version
version.restype = ctypes.c_char_p
print(version().decode())' "$library") || fail "$library can't be loaded here"
  [ "$found" = "$version" ] || fail "$library is of version $found, this repository of $version"
}

# Writes the checksums of all that was made into a folder.
write_checksums() { (cd "$1" && sha256sum xserv-* > SHA256SUMS); }
