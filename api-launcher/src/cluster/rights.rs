//! Every right the launcher uses, and what for. `rbac/` grants these and no others.

/// Where a right is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Namespace of the runs.
    Runs,
    /// Namespace of the launcher.
    Launcher,
}

/// When a right is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    Always,
    /// Job data travels in a Secret.
    JobDataInSecret,
    /// More than one replica.
    Election,
}

/// One verb on one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    pub verb: &'static str,
    pub group: &'static str,
    pub resource: &'static str,
    pub subresource: &'static str,
    pub place: Place,
    pub need: Need,
    /// What the launcher does with it.
    pub purpose: &'static str,
}

const fn right(
    verb: &'static str,
    group: &'static str,
    resource: &'static str,
    purpose: &'static str,
) -> Right {
    Right {
        verb,
        group,
        resource,
        subresource: "",
        place: Place::Runs,
        need: Need::Always,
        purpose,
    }
}

const fn secret(verb: &'static str, purpose: &'static str) -> Right {
    Right {
        need: Need::JobDataInSecret,
        ..right(verb, "", "secrets", purpose)
    }
}

const fn lease(verb: &'static str, purpose: &'static str) -> Right {
    Right {
        place: Place::Launcher,
        need: Need::Election,
        ..right(verb, "coordination.k8s.io", "leases", purpose)
    }
}

/// The table.
pub const RIGHTS: &[Right] = &[
    right("create", "batch", "jobs", "start runs"),
    right(
        "get",
        "batch",
        "jobs",
        "continue what an earlier delivery began",
    ),
    right(
        "list",
        "batch",
        "jobs",
        "find every run again after a restart",
    ),
    right("watch", "batch", "jobs", "follow runs"),
    right(
        "patch",
        "batch",
        "jobs",
        "release runs and note what was reported",
    ),
    right(
        "delete",
        "batch",
        "jobs",
        "cancel runs and keep the history short",
    ),
    right("list", "", "pods", "tell how runs stand"),
    right("watch", "", "pods", "follow runs"),
    Right {
        subresource: "log",
        ..right("get", "", "pods", "show the log of a run")
    },
    right(
        "list",
        "",
        "events",
        "tell why a run waits or ended without a word",
    ),
    secret("create", "store the job data"),
    secret("get", "tell whose job data is in the way (metadata only)"),
    secret("delete", "remove job data that a deleted Job left"),
    lease("create", "let one replica watch"),
    lease("get", "let one replica watch"),
    lease("update", "let one replica watch"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_right_stands_twice() {
        for (at, right) in RIGHTS.iter().enumerate() {
            let same = |other: &&Right| {
                (other.verb, other.group, other.resource, other.subresource)
                    == (right.verb, right.group, right.resource, right.subresource)
            };
            assert!(
                RIGHTS[at + 1..].iter().find(same).is_none(),
                "{right:?} stands twice"
            );
        }
    }
}
