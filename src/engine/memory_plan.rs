//! The memory that a model takes and the KV cache that it gets: decided from its headers, before
//! anything is read, in one place for loading and for planning.

use std::path::{Component, Path};

use super::options::EngineOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::model::MemoryNeeds;
use crate::ops::kv_cache::layout::BLOCK_SIZE;

/// The most contexts that a cache has room for: more sequences are not computed at a time, and a
/// small model is not to take a whole device.
const MAX_CONTEXTS: u64 = 256;

/// The contexts that a cache on the host has room for where memory is plentiful: several requests
/// at a time are usual, and memory is committed as the cache fills.
const HOST_CONTEXTS: u64 = 4;

/// Returns the memory that the system could still give, if it says so: the available memory of
/// Linux, and no more than the control group of a container leaves.
pub(super) fn available_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let available = line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)?;
    Some(control_group_room(Path::new("/")).map_or(available, |room| available.min(room)))
}

/// Returns the memory that the control groups of this process leave to it, `None` if they set no
/// limit. A group is bound by the limits of all groups above it. `root`: where `proc` and `sys`
/// are.
fn control_group_room(root: &Path) -> Option<u64> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    // Each line is number:controllers:path. Version 2 names no controllers.
    let of_line = |line: &str| -> Option<u64> {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (mount, limit, used) = if controllers.is_empty() {
            ("sys/fs/cgroup", "memory.max", "memory.current")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            return None;
        };
        // A path outside the mounted tree begins with "..": only the tree's own root is seen then.
        let is_inside = |path: &&Path| path.components().all(|c| c != Component::ParentDir);
        let path = Some(Path::new(path.trim_start_matches('/'))).filter(is_inside);
        let room = |group: &Path| -> Option<u64> {
            let number = |file: &str| -> Option<u64> {
                let file = root.join(mount).join(group).join(file);
                std::fs::read_to_string(file).ok()?.trim().parse().ok()
            };
            // "max", or no such file, is no limit.
            Some(number(limit)?.saturating_sub(number(used).unwrap_or(0)))
        };
        path.unwrap_or(Path::new("")).ancestors().filter_map(room).min()
    };
    groups.lines().filter_map(of_line).min()
}

/// Preempted requests of a model on a device may take one part in `SWAP_SHARE` of the host's
/// available memory, and no more than `MAX_SWAP_BYTES`.
const SWAP_SHARE: u64 = 8;
const MAX_SWAP_BYTES: u64 = 4 << 30;

/// Returns the number of blocks of preempted requests, of `block_bytes` each, that may be kept on
/// the host. None on the CPU by default: the KV cache lies in the same memory there.
pub(super) fn max_swapped(options: &EngineOptions, on_device: bool, block_bytes: usize) -> usize {
    let bytes = match (options.max_swap_bytes, on_device) {
        (0, true) => (available_memory_bytes().unwrap_or(0) / SWAP_SHARE).min(MAX_SWAP_BYTES),
        (0, false) => 0,
        (bytes, _) => bytes,
    };
    // Places are numbered in 32 bits.
    usize::try_from((bytes / block_bytes.max(1) as u64).min(u64::from(u32::MAX))).unwrap_or(0)
}

/// The memory that a model can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Available {
    /// The available bytes of the host, if known. Memory is committed as it is used.
    Host(Option<u64>),
    /// The free bytes of a device, if known. Memory is taken at once.
    Device(Option<u64>),
}

impl Available {
    /// Returns the available bytes, if known.
    pub(super) fn available(self) -> Option<u64> {
        match self {
            Available::Host(available) | Available::Device(available) => available,
        }
    }

    /// Returns the bytes that the options and the memory allow together, if either is known.
    pub(super) fn limit(self, options: &EngineOptions) -> Option<u64> {
        match (options.max_memory_bytes, self.available()) {
            (0, available) => available,
            (budget, None) => Some(budget),
            (budget, Some(available)) => Some(budget.min(available)),
        }
    }
}

/// The memory that a load will take, known before it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryPlan {
    /// Weights, in the element type to be loaded.
    pub(super) weights_bytes: u64,
    /// Activations of the longest pass, and the scratch of the operators.
    pub(super) workspace_bytes: u64,
    /// Keys and values of one token in all layers.
    pub(super) kv_bytes_per_token: u64,
}

/// The size of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KvSize {
    /// Longest context of a request.
    pub(super) max_context_tokens: u64,
    /// Tokens of the cache, a multiple of the block.
    pub(super) kv_cache_tokens: u64,
}

impl From<MemoryNeeds> for MemoryPlan {
    fn from(plan: MemoryNeeds) -> Self {
        let MemoryNeeds { weights_bytes, workspace_bytes, kv_bytes_per_token } = plan;
        MemoryPlan { weights_bytes, workspace_bytes, kv_bytes_per_token }
    }
}

impl MemoryPlan {
    /// Returns the bytes of everything but the cache.
    fn fixed_bytes(&self) -> u64 {
        self.weights_bytes.saturating_add(self.workspace_bytes)
    }

    /// Returns the bytes of everything, with a cache of `kv_cache_tokens`.
    pub(super) fn total_bytes(&self, kv_cache_tokens: u64) -> u64 {
        self.fixed_bytes().saturating_add(self.kv_bytes_per_token.saturating_mul(kv_cache_tokens))
    }

    /// Returns the smallest budget with which the options load.
    pub(super) fn minimum_bytes(&self, options: &EngineOptions) -> u64 {
        self.total_bytes(self.asked_tokens(options).unwrap_or(BLOCK_SIZE as u64))
    }

    /// Returns the tokens, in whole blocks, that fit into `bytes` beside weights and work space.
    fn tokens_within(&self, bytes: u64) -> u64 {
        let block = BLOCK_SIZE as u64;
        bytes.saturating_sub(self.fixed_bytes()) / self.kv_bytes_per_token.max(1) / block * block
    }

    /// Returns the tokens that the options ask for.
    fn asked_tokens(&self, options: &EngineOptions) -> Option<u64> {
        let most = || u64::MAX / self.kv_bytes_per_token.max(1);
        (options.kv_cache_tokens > 0).then(|| {
            options.kv_cache_tokens.checked_next_multiple_of(BLOCK_SIZE as u64).unwrap_or_else(most)
        })
    }

    /// Returns the longest context and the tokens of the KV cache under the options' budget, in the
    /// available memory.
    pub(super) fn kv_size(
        &self,
        options: &EngineOptions,
        max_context: u64,
        available: Available,
    ) -> Result<KvSize> {
        let block = BLOCK_SIZE as u64;
        let one = max_context.div_ceil(block).saturating_mul(block);
        // Slots are numbered in 32 bits.
        let most = one.saturating_mul(MAX_CONTEXTS).min(u64::from(u32::MAX) / block * block);
        let limit = match available {
            Available::Device(_) => available.limit(options),
            // The system may have more to give than it says, and takes unused memory back.
            Available::Host(_) => {
                (options.max_memory_bytes > 0).then_some(options.max_memory_bytes)
            }
        };
        let needed = self.minimum_bytes(options);
        if let Some(limit) = limit.filter(|&limit| needed > limit) {
            return Err(self.does_not_fit(options, limit));
        }
        let tokens = match self.asked_tokens(options) {
            Some(asked) if options.max_context_tokens > 0 && asked < max_context => {
                return Err(Error::invalid_argument(format!(
                    "max_context_tokens is {max_context}, but kv_cache_tokens is {}: one request of the \
                     longest context must fit",
                    options.kv_cache_tokens
                )));
            }
            Some(asked) => asked,
            None => self.default_tokens(options, available, one).clamp(block, most.max(block)),
        };
        // A context that the cache could not hold alone is not offered.
        Ok(KvSize { max_context_tokens: max_context.min(tokens), kv_cache_tokens: tokens })
    }

    /// Returns the tokens of a cache whose size was left to the library: the rest of the budget, or
    /// without one a share of the available memory. `one`: the tokens of a longest context, in
    /// whole blocks.
    fn default_tokens(&self, options: &EngineOptions, available: Available, one: u64) -> u64 {
        let budget = (options.max_memory_bytes > 0).then_some(options.max_memory_bytes);
        // The driver, kernels and other programs need the rest of a device.
        let share = |free: u64| free / 10 * 9;
        match (available, budget) {
            (Available::Device(None) | Available::Host(None), None) => one,
            (Available::Device(None) | Available::Host(None), Some(budget)) => {
                self.tokens_within(budget)
            }
            (Available::Device(Some(free)), budget) => {
                self.tokens_within(share(free).min(budget.unwrap_or(u64::MAX)))
            }
            (Available::Host(Some(available)), Some(budget)) => {
                self.tokens_within(budget.min(available))
            }
            (Available::Host(Some(available)), None) => {
                let part = |parts: u64| {
                    let spare = available.saturating_sub(self.fixed_bytes()) / parts;
                    self.tokens_within(self.fixed_bytes().saturating_add(spare))
                };
                // A quarter of what is free for several contexts, half of it for one.
                part(4).min(one.saturating_mul(HOST_CONTEXTS)).max(part(2).min(one))
            }
        }
    }

    fn does_not_fit(&self, options: &EngineOptions, limit: u64) -> Error {
        let whose = if options.max_memory_bytes > 0 && limit == options.max_memory_bytes {
            format!("max_memory_bytes is {limit}")
        } else {
            format!("{limit} bytes of memory are free")
        };
        let tokens = self.asked_tokens(options).unwrap_or(BLOCK_SIZE as u64);
        Error::new(
            ErrorKind::OutOfMemory,
            format!(
                "{whose}, but the weights take {} bytes, the work space {} and the KV cache {} for each of at \
                 least {tokens} tokens",
                self.weights_bytes, self.workspace_bytes, self.kv_bytes_per_token
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: MemoryPlan =
        MemoryPlan { weights_bytes: 1000, workspace_bytes: 100, kv_bytes_per_token: 10 };

    fn size(options: &EngineOptions, available: Available) -> (u64, u64) {
        let size = PLAN.kv_size(options, 100, available).unwrap();
        (size.max_context_tokens, size.kv_cache_tokens)
    }

    fn asked(max_memory_bytes: u64, kv_cache_tokens: u64) -> EngineOptions {
        EngineOptions { max_memory_bytes, kv_cache_tokens, ..Default::default() }
    }

    #[test]
    fn the_host_gives_four_contexts_by_default_and_less_when_memory_is_short() {
        let default = EngineOptions::default();
        assert_eq!(size(&default, Available::Host(None)), (100, 128));
        assert_eq!(size(&default, Available::Host(Some(1_000_000))), (100, 512));
        // A quarter of 10,000 bytes: 250 tokens, seven whole blocks.
        assert_eq!(size(&default, Available::Host(Some(11_100))), (100, 224));
        // A quarter of 4000 bytes is less than one context, half of them is not.
        assert_eq!(size(&default, Available::Host(Some(5100))), (100, 128));
        // (2740 - 1100) / 2 = 820 bytes: 82 tokens, two whole blocks.
        assert_eq!(size(&default, Available::Host(Some(2740))), (64, 64));
        assert_eq!(size(&default, Available::Host(Some(0))), (32, 32));
    }

    /// A tree of control groups: files by their paths below a temporary root.
    struct Tree(std::path::PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Tree {
            let root = std::env::temp_dir().join(format!("xserv-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            Tree(root)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_limits_of_all_control_groups_count() {
        let room =
            |name: &str, files: &[(&str, &str)]| control_group_room(&Tree::new(name, files).0);
        assert_eq!(room("none", &[]), None);
        let group = ("proc/self/cgroup", "0::/system.slice/a.service\n");
        let v2 = "sys/fs/cgroup";
        let own = [
            group,
            (&*format!("{v2}/system.slice/a.service/memory.max"), "1000\n"),
            (&*format!("{v2}/system.slice/a.service/memory.current"), "300\n"),
            (&*format!("{v2}/system.slice/memory.max"), "max\n"),
        ];
        assert_eq!(room("own", &own), Some(700));
        let parent = [
            group,
            (&*format!("{v2}/system.slice/a.service/memory.max"), "1000\n"),
            (&*format!("{v2}/system.slice/memory.max"), "900\n"),
            (&*format!("{v2}/system.slice/memory.current"), "800\n"),
        ];
        assert_eq!(room("parent", &parent), Some(100));
        // In a container the group is the root of what is mounted, whatever its path says.
        for path in ["0::/\n", "0::/docker/12ab\n", "0::/../other\n"] {
            let file = &*format!("{v2}/memory.max");
            let files = [("proc/self/cgroup", path), (file, "500\n")];
            assert_eq!(room("container", &files), Some(500), "{path}");
        }
        // Used up.
        let over =
            [group, (&*format!("{v2}/memory.max"), "5"), (&*format!("{v2}/memory.current"), "9")];
        assert_eq!(room("over", &over), Some(0));
        let v1 = [
            ("proc/self/cgroup", "3:cpu,cpuacct:/x\n2:memory:/user/b\n1:name=systemd:/y\n0::/z\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/user/b/memory.limit_in_bytes", "4000\n"),
            ("sys/fs/cgroup/memory/user/b/memory.usage_in_bytes", "1000\n"),
            ("sys/fs/cgroup/x/memory.max", "1"),
        ];
        assert_eq!(room("v1", &v1), Some(3000));
    }

    #[test]
    fn a_device_gives_its_free_memory() {
        let default = EngineOptions::default();
        assert_eq!(size(&default, Available::Device(None)), (100, 128));
        // Nine tenths of 11,000 bytes without 1100: 880 tokens, 27 blocks.
        assert_eq!(size(&default, Available::Device(Some(11_000))), (100, 864));
        // Nine tenths leave no block, the whole does.
        assert_eq!(size(&default, Available::Device(Some(1420))), (32, 32));
        // No more than can be used.
        assert_eq!(size(&default, Available::Device(Some(1 << 40))), (100, 128 * MAX_CONTEXTS));
        for available in [Available::Device(Some(1419)), Available::Device(Some(0))] {
            let error = PLAN.kv_size(&default, 100, available).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfMemory);
            assert!(error.message().contains("bytes of memory are free"), "{error}");
        }
        // A cache that was asked for may take all.
        assert_eq!(size(&asked(0, 320), Available::Device(Some(4300))), (100, 320));
        assert!(PLAN.kv_size(&asked(0, 320), 100, Available::Device(Some(4299))).is_err());
    }

    #[test]
    fn a_budget_is_used_up_and_kept_or_refused() {
        for available in
            [Available::Host(None), Available::Host(Some(1 << 30)), Available::Device(None)]
        {
            assert_eq!(size(&asked(1100 + 640, 0), available), (64, 64));
            assert_eq!(size(&asked(1100 + 640, 64), available), (64, 64));
            // 9000 bytes: 28 blocks.
            assert_eq!(size(&asked(1100 + 9000, 0), available), (100, 896));
            for (bytes, tokens) in [(1000, 0), (1100, 0), (1419, 0), (1739, 64)] {
                let options = asked(bytes, tokens);
                let error = PLAN.kv_size(&options, 100, available).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{bytes} {tokens}");
                assert!(error.message().contains(&format!("max_memory_bytes is {bytes}")));
                let least = PLAN.minimum_bytes(&options);
                assert!(least > bytes && PLAN.total_bytes(32.max(tokens)) == least);
                assert!(PLAN.kv_size(&asked(least, tokens), 100, available).is_ok());
            }
        }
        // A budget larger than the memory.
        assert_eq!(size(&asked(1 << 40, 0), Available::Host(Some(2060))), (96, 96));
        assert_eq!(size(&asked(1 << 40, 0), Available::Device(Some(11_000))), (100, 864));
    }

    #[test]
    fn a_cache_for_less_than_the_context_that_was_asked_for_is_refused() {
        let options = EngineOptions { max_context_tokens: 100, ..asked(0, 64) };
        let error = PLAN.kv_size(&options, 100, Available::Host(None)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}
