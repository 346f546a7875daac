//! Where the record of a step with its claim is kept (contract 11.1).

/// Where the record of a step is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Records {
    /// On the platform, and in its Redis if there is one.
    Platform,
    /// In a data folder that all pods share.
    Shared,
    /// In a data folder of this pod, which is deleted with the pod.
    Pod,
}

impl Records {
    const ALL: [(&'static str, Self); 3] = [
        ("platform", Self::Platform),
        ("shared", Self::Shared),
        ("pod", Self::Pod),
    ];

    /// The name in settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }

    /// The variant with that name. Upper and lower case are equal.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(text))
            .map(|(_, records)| records)
    }

    /// Whether the next pod of a step finds the claim of the previous pod.
    #[must_use]
    pub const fn outlive_the_pod(self) -> bool {
        !matches!(self, Self::Pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_back() {
        for records in [Records::Platform, Records::Shared, Records::Pod] {
            assert_eq!(Records::parse(records.name()), Some(records));
        }
        assert_eq!(Records::parse("SHARED"), Some(Records::Shared));
        assert_eq!(Records::parse("elsewhere"), None);
    }
}
