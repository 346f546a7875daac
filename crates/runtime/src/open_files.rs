//! The limit of open files. Many systems allow 1,024 unless a process asks for more, and each connection is one.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the limit of open files to `wanted`, as far as the system allows it. Returns the limit.
pub fn allow_open_files(wanted: u64) -> u64 {
    let Ok((now, most)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return wanted;
    };
    let raised = wanted.min(most);
    if raised <= now || setrlimit(Resource::RLIMIT_NOFILE, raised, most).is_err() {
        return now;
    }
    raised
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_as_far_as_the_system_allows_and_never_lowered() {
        let (now, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(allow_open_files(1), now);
        let wanted = most.min(now + 10);
        assert_eq!(allow_open_files(wanted), wanted);
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap().0, wanted);
        if most < u64::MAX {
            assert_eq!(allow_open_files(most + 1), most);
        }
    }
}
