//! Reads how much memory the executor's control group uses, its limit, and whether the kernel killed a process to keep it:
//! versions 1 and 2.
//!
//! The kernel kills if it cannot bring a group below its limit by dropping page cache. So page cache that the kernel
//! can drop is not counted. Files in memory (`tmpfs`) cannot be dropped, and are counted.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Bytes in use, and the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub used: u64,
    pub limit: u64,
}

impl Usage {
    /// Whether at least this percentage of the limit is in use.
    pub fn reaches(&self, percent: u64) -> bool {
        u128::from(self.used) * 100 >= u128::from(self.limit) * u128::from(percent)
    }
}

/// The control group whose limit is the tightest for this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryGroup {
    folder: PathBuf,
    version: Version,
    limit: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    const fn limit_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.limit_in_bytes",
            Self::V2 => "memory.max",
        }
    }

    const fn usage_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.usage_in_bytes",
            Self::V2 => "memory.current",
        }
    }

    /// Holds the number of processes that the kernel killed, as `oom_kill`.
    const fn kills_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.oom_control",
            Self::V2 => "memory.events",
        }
    }

    /// Names in `memory.stat` of the page cache, and of its files in memory. Version 1 has other names for the counts
    /// that include descendants.
    const fn cache_names(self) -> (&'static str, &'static str) {
        match self {
            Self::V1 => ("total_cache", "total_shmem"),
            Self::V2 => ("file", "shmem"),
        }
    }
}

/// Version 1 expresses "no limit" as the largest whole number of pages.
const NO_LIMIT_V1: u64 = i64::MAX as u64 & !0xFFFF;

impl MemoryGroup {
    /// The group of this process; `None` if no group has a limit, or if none is visible.
    pub fn of_this_process() -> Option<Self> {
        let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
        Self::find(Path::new("/sys/fs/cgroup"), &membership)
    }

    /// The limit, in bytes.
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// The current use.
    pub fn usage(&self) -> io::Result<Usage> {
        let current = number(&self.folder.join(self.version.usage_file()))?;
        let stat = fs::read_to_string(self.folder.join("memory.stat"))?;
        let (cache, shared) = self.version.cache_names();
        let droppable = stat_value(&stat, cache).saturating_sub(stat_value(&stat, shared));
        Ok(Usage {
            used: current.saturating_sub(droppable),
            limit: self.limit,
        })
    }

    /// How many processes the kernel has killed to keep the limit. Old kernels do not count them.
    fn kills(&self) -> Option<u64> {
        let events = fs::read_to_string(self.folder.join(self.version.kills_file())).ok()?;
        Some(stat_value(&events, "oom_kill"))
    }

    /// `membership` is `/proc/<pid>/cgroup`: `id:controllers:path` lines, version 2 with id 0 and no controllers.
    pub(crate) fn find(root: &Path, membership: &str) -> Option<Self> {
        let groups = membership.lines().filter_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            if id == "0" && controllers.is_empty() {
                return Some((root.to_owned(), Version::V2, path));
            }
            let memory = controllers.split(',').any(|name| name == "memory");
            memory.then(|| (root.join("memory"), Version::V1, path))
        });
        groups
            .flat_map(|(mount, version, path)| levels(&mount, path, version))
            .min_by_key(|group| group.limit)
    }
}

/// What the kernel kills in a group from now on, to keep its limit.
#[derive(Debug, Default)]
pub struct OomKills {
    group: Option<MemoryGroup>,
    before: Option<u64>,
}

impl OomKills {
    /// Nothing is ever seen without a group.
    pub fn from_now(group: Option<MemoryGroup>) -> Self {
        let before = group.as_ref().and_then(MemoryGroup::kills);
        Self { group, before }
    }

    /// The limit in bytes, if the kernel has killed a process since then.
    pub fn exceeded_limit(&self) -> Option<u64> {
        let group = self.group.as_ref()?;
        (group.kills()? > self.before?).then_some(group.limit)
    }
}

/// The group and its ancestors that are visible and have a limit. A container sees its own group as the root of the
/// mount. Version 1 names the group by its path on the node, so paths that are missing in the container are skipped.
fn levels(mount: &Path, path: &str, version: Version) -> Vec<MemoryGroup> {
    let below = Path::new(path.trim_start_matches('/'));
    below
        .ancestors()
        .map(|level| mount.join(level))
        .filter_map(|folder| {
            let limit = number(&folder.join(version.limit_file())).ok()?;
            (limit < NO_LIMIT_V1 && limit > 0).then_some(MemoryGroup {
                folder,
                version,
                limit,
            })
        })
        .collect()
}

/// Reads a file that holds one number. `max` is an error, like any other text.
fn number(path: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    text.trim()
        .parse()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

fn stat_value(stat: &str, name: &str) -> u64 {
    stat.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(key, _)| *key == name)
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    const MIB: u64 = 1024 * 1024;

    fn tree(files: &[(&str, &str)]) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    #[test]
    fn version_2_leaves_out_page_cache_but_not_files_in_memory() {
        let root = tree(&[
            ("memory.max", "104857600\n"),
            ("memory.current", "94371840\n"),
            (
                "memory.stat",
                "anon 20971520\nfile 73400320\nkernel 0\nshmem 10485760\ninactive_file 52428800\n",
            ),
        ]);
        let group = MemoryGroup::find(root.path(), "0::/\n").unwrap();
        let usage = group.usage().unwrap();
        assert_eq!(
            usage,
            Usage {
                used: 30 * MIB,
                limit: 100 * MIB
            }
        );
        assert!(usage.reaches(30) && !usage.reaches(31));
    }

    #[test]
    fn version_1_counts_descendants_too() {
        let root = tree(&[
            ("memory/a/memory.limit_in_bytes", "104857600\n"),
            ("memory/a/memory.usage_in_bytes", "52428800\n"),
            (
                "memory/a/memory.stat",
                "cache 0\ntotal_cache 20971520\ntotal_shmem 5242880\n",
            ),
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        let membership = "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n";
        let usage = MemoryGroup::find(root.path(), membership)
            .unwrap()
            .usage()
            .unwrap();
        assert_eq!(usage.used, 35 * MIB);
    }

    #[test]
    fn the_lowest_limit_of_all_ancestors_counts() {
        let root = tree(&[
            ("pod/memory.max", "1000"),
            ("pod/app/memory.max", "max"),
            ("pod/app/deep/memory.max", "2000"),
        ]);
        let group = MemoryGroup::find(root.path(), "0::/pod/app/deep\n").unwrap();
        assert_eq!(group.limit(), 1000);
        assert_eq!(group.folder, root.path().join("pod"));
    }

    #[test]
    fn a_container_finds_its_group_at_the_root_of_the_mount() {
        let root = tree(&[("memory/memory.limit_in_bytes", "1000")]);
        let membership = "4:memory:/kubepods/pod1/c1\n";
        assert_eq!(
            MemoryGroup::find(root.path(), membership).unwrap().limit(),
            1000
        );
    }

    #[test]
    fn only_kills_from_now_on_count() {
        for (file, limit, membership) in [
            ("memory.events", "memory.max", "0::/\n"),
            (
                "memory/memory.oom_control",
                "memory/memory.limit_in_bytes",
                "4:memory:/\n",
            ),
        ] {
            let root = tree(&[(limit, "1000"), (file, "under_oom 0\noom_kill 3\n")]);
            let kills = OomKills::from_now(MemoryGroup::find(root.path(), membership));
            assert_eq!(kills.exceeded_limit(), None, "{file}");
            fs::write(root.path().join(file), "under_oom 0\noom_kill 4\n").unwrap();
            assert_eq!(kills.exceeded_limit(), Some(1000), "{file}");
            fs::remove_file(root.path().join(file)).unwrap();
            assert_eq!(kills.exceeded_limit(), None, "{file}");
        }
        assert_eq!(OomKills::from_now(None).exceeded_limit(), None);
    }

    #[test]
    fn without_a_limit_there_is_no_group() {
        let root = tree(&[
            ("memory.max", "max"),
            ("memory/memory.limit_in_bytes", "9223372036854771712"),
        ]);
        assert_eq!(MemoryGroup::find(root.path(), "4:memory:/\n0::/\n"), None);
        assert_eq!(MemoryGroup::find(root.path(), "nonsense"), None);
        assert_eq!(MemoryGroup::find(Path::new("/nonexistent"), "0::/"), None);
    }
}
