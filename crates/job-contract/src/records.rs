//! Where the record of a step is kept, its claim above all (contract 11.1).

/// Who keeps the record of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Records {
    /// The platform, and its Redis where it has one.
    Platform,
    /// A data folder that all pods share.
    Shared,
    /// A data folder of this pod alone, which ends with it.
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

    /// The one with that name, in any case.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(text))
            .map(|(_, records)| records)
    }

    /// Whether the next pod of a step finds the claim of the pod before it.
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
