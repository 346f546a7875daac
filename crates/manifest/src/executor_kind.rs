//! Decides which executor an image holds. Mayfly's executor claims its step, and reads more forms of job data than a
//! stock executor.

use super::image::Reference;

/// Names of Mayfly's images begin with this, in the last part of their repository.
const OUR_IMAGES: &str = "mayfly-executor";

/// The program in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutorKind {
    /// Mayfly's executor.
    Mayfly,
    /// Terrakube's own executor, or an unknown one.
    Stock,
}

/// The operator's setting for the kind of executor in images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExecutorKindSetting {
    /// The name of the image decides.
    #[default]
    Auto,
    /// Every image holds this executor.
    Always(ExecutorKind),
}

impl ExecutorKindSetting {
    /// The executor in `image`.
    pub fn of(self, image: &str) -> ExecutorKind {
        match self {
            Self::Always(kind) => kind,
            Self::Auto if is_ours(image) => ExecutorKind::Mayfly,
            Self::Auto => ExecutorKind::Stock,
        }
    }
}

fn is_ours(image: &str) -> bool {
    Reference::parse(image).is_ok_and(|image| image.name().starts_with(OUR_IMAGES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build;
    use crate::deployment::{DEFAULT_IMAGE, Deployment};
    use crate::overlay::Overlay;
    use crate::overrides::Overrides;
    use job_contract::{Document, JobData, env};
    use rstest::rstest;

    #[rstest]
    #[case(DEFAULT_IMAGE, ExecutorKind::Mayfly)]
    #[case(
        "registry.example.test:5000/tools/mayfly-executor:1@sha256:0000000000000000000000000000000000000000000000000000000000000000",
        ExecutorKind::Mayfly
    )]
    #[case("ghcr.io/acme/mayfly-executor-groovy", ExecutorKind::Mayfly)]
    #[case(
        "ghcr.io/mayfly-executor/terrakube-executor:2.33.0",
        ExecutorKind::Stock
    )]
    #[case("azbuilder/executor:2.22.0", ExecutorKind::Stock)]
    #[case("acme/my-mayfly-executor", ExecutorKind::Stock)]
    #[case("Not An Image", ExecutorKind::Stock)]
    fn the_last_part_of_the_repository_decides_the_kind(
        #[case] image: &str,
        #[case] kind: ExecutorKind,
    ) {
        assert_eq!(ExecutorKindSetting::Auto.of(image), kind);
    }

    #[test]
    fn the_image_that_the_run_really_uses_counts() {
        let kind = |deployment: &Deployment, requested: Option<&str>| {
            deployment.executor_kind_of(&Overrides {
                image: requested.map(str::to_owned),
                ..Overrides::default()
            })
        };
        let stock = "registry.example.test/terrakube/executor:1";
        let usual = Deployment::default();
        assert_eq!(kind(&usual, None), ExecutorKind::Mayfly);
        assert_eq!(kind(&usual, Some(stock)), ExecutorKind::Stock);
        let template = format!("spec: {{containers: [{{name: executor, image: '{stock}'}}]}}");
        let templated = Deployment {
            overlay: Some(Overlay::parse(&template).unwrap()),
            ..Deployment::default()
        };
        assert_eq!(kind(&templated, None), ExecutorKind::Stock);
    }

    #[test]
    fn a_run_with_a_lease_needs_an_image_with_mayflys_executor() {
        let leased = |setting: ExecutorKindSetting, image: &str| {
            let deployment = Deployment {
                leased: true,
                executor_kind: setting,
                policy: serde_saphyr::from_str("imageRegistries: [registry.example.test]").unwrap(),
                ..Deployment::default()
            };
            let mut job = JobData {
                step_type: Some("terraformApply".to_owned()),
                organization_id: "o".to_owned(),
                workspace_id: "w".to_owned(),
                job_id: "1".to_owned(),
                step_id: "s".to_owned(),
                ..JobData::default()
            };
            let requested = (env::EPHEMERAL_IMAGE.to_owned(), image.to_owned());
            job.environment_variables.extend([requested]);
            let built = build(&Document::written(&job), &deployment);
            built.map(drop).map_err(|errors| errors.to_string())
        };
        let (auto, known) = (
            ExecutorKindSetting::Auto,
            ExecutorKindSetting::Always(ExecutorKind::Mayfly),
        );
        let (ours, other) = (
            "registry.example.test/mayfly-executor-groovy:1",
            "registry.example.test/executor:1",
        );
        assert_eq!(leased(auto, ours), Ok(()));
        assert_eq!(leased(known, other), Ok(()));
        for (setting, image) in [
            (auto, other),
            (ExecutorKindSetting::Always(ExecutorKind::Stock), ours),
        ] {
            let error = leased(setting, image).unwrap_err();
            assert!(error.contains(env::EXECUTOR_KIND), "{error}");
            assert!(error.contains(image), "{error}");
        }
    }

    #[test]
    fn the_operators_setting_applies_to_every_image() {
        for kind in [ExecutorKind::Mayfly, ExecutorKind::Stock] {
            assert_eq!(ExecutorKindSetting::Always(kind).of(DEFAULT_IMAGE), kind);
            assert_eq!(ExecutorKindSetting::Always(kind).of("acme/other"), kind);
        }
    }
}
