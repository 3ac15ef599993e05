# Finds the tools that the scripts need besides Cargo's own, and installs CMake when it is missing:
# without root, into target/tools of this repository.
#
# Sourced by scripts, which then have find_cargo, find_compiler, find_cmake and cargo_tests; or run as
#     bash tests/support/tools.sh cmake
# which prints the path of a CMake, as the Rust tests do. Progress messages go to stderr.
#
#     bash tests/support/tools.sh nvcc
# installs NVIDIA's compiler into .cuda of this repository where there is none (100 MB, Python
# wheels, no root): later builds then contain the CUDA kernels.

tools_repository=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
tools_folder=$tools_repository/target/tools
cmake_at_least=3.16

tools_say() { echo "$*" >&2; }

# Puts cargo on PATH, even if rustup installed it without setting up the shell.
find_cargo() {
  command -v cargo > /dev/null || PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
  if ! command -v cargo > /dev/null; then
    tools_say "Rust is missing. Install it, without root, from https://rustup.rs:"
    tools_say "    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh"
    return 1
  fi
}

# Sets CC.
find_compiler() {
  local name
  for name in "${CC:-}" cc gcc clang; do
    if [ -n "$name" ] && command -v "$name" > /dev/null; then
      CC=$name
      return 0
    fi
  done
  tools_say "A C compiler is missing: install gcc or clang (Debian, Ubuntu: apt-get install gcc g++)."
  return 1
}

is_good_cmake() {
  local version
  version=$("$1" --version 2> /dev/null | sed -n '1s/^cmake version \([0-9.]*\).*/\1/p')
  [ -n "$version" ] && [ "$(printf '%s\n' "$cmake_at_least" "$version" | sort -V | head -n 1)" = "$cmake_at_least" ]
}

# The program in an unpacked or installed "cmake" wheel; it needs no Python to run.
cmake_in_tools() { ls -d "$tools_folder"/python/cmake/data/bin/cmake "$tools_folder"/venv/lib*/python*/site-packages/cmake/data/bin/cmake 2> /dev/null | head -n 1 || true; }

install_cmake() {
  local log=$tools_folder/install.log
  mkdir -p "$tools_folder"
  tools_say "CMake $cmake_at_least or later is missing: installing it into target/tools"
  # Each of these works on some systems only: pip may be missing, and so may the venv module.
  python3 -m pip install --quiet --disable-pip-version-check --upgrade --target "$tools_folder/python" \
    'cmake>=3.25,<5' > "$log" 2>&1 && return
  { python3 -m venv "$tools_folder/venv" &&
    "$tools_folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check 'cmake>=3.25,<5'; } >> "$log" 2>&1 && return
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    { apt-get install -y cmake || { apt-get update && apt-get install -y cmake; }; } >> "$log" 2>&1 < /dev/null && return
  fi
  tools_say "CMake could not be installed (see target/tools/install.log). Install CMake, or Python 3 with pip."
  return 1
}

# Sets CMAKE.
find_cmake() {
  CMAKE=$(command -v cmake || true)
  if [ -n "$CMAKE" ] && is_good_cmake "$CMAKE"; then return 0; fi
  CMAKE=$(cmake_in_tools)
  if [ -n "$CMAKE" ] && is_good_cmake "$CMAKE"; then return 0; fi
  install_cmake || return 1
  CMAKE=$(cmake_in_tools)
  [ -n "$CMAKE" ] || CMAKE=$(command -v cmake)
  is_good_cmake "$CMAKE"
}

# Prints the nvcc that csrc/build.rs will use; fails if there is none.
find_nvcc() {
  local folder
  if [ -n "${NVCC:-}" ]; then
    [ "$NVCC" != none ] && echo "$NVCC"
    return
  fi
  for folder in "${CUDA_HOME:-/nonexistent}/bin" "${CUDA_PATH:-/nonexistent}/bin" \
    "$tools_repository/.cuda/nvidia/cu13/bin"; do
    if [ -x "$folder/nvcc" ]; then echo "$folder/nvcc"; return; fi
  done
  command -v nvcc && return
  [ -x /usr/local/cuda/bin/nvcc ] && echo /usr/local/cuda/bin/nvcc
}

# Installs all five at once and without their own requirements, which name no versions: the parts of
# a compiler must be of one version, and drivers of CUDA 13.0 cannot read later PTX.
install_nvcc() {
  find_nvcc > /dev/null && return
  tools_say "Installing nvcc 13.0 into .cuda"
  rm -rf "$tools_repository/.cuda"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$tools_repository/.cuda" nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 \
    nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 >&2
}

# Builds or runs all tests but those of the documentation, with these arguments of cargo test. Those inside the
# library need it compiled once more for them alone, which takes minutes if it is optimised.
cargo_tests() {
  local code=0
  cargo test --locked --no-fail-fast --lib --config profile.dev.package.xserv.opt-level=0 "$@" || code=$?
  cargo build --locked --examples || code=$?
  cargo test --locked --no-fail-fast --test '*' "$@" || code=$?
  return "$code"
}

# Prints one line about the CUDA tools and GPUs found.
describe_cuda() {
  local gpu nvcc
  gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1) || true
  nvcc=$(find_nvcc) || nvcc="none (bash tests/support/tools.sh nvcc installs one): building for the CPU only"
  echo "GPU: ${gpu:-none}; nvcc: $nvcc"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  case "${1:-}" in
    cmake) find_cmake && echo "$CMAKE" ;;
    nvcc) install_nvcc && find_nvcc ;;
    *) tools_say "usage: tools.sh cmake|nvcc"; exit 2 ;;
  esac
fi
