//! Names of objects in a bucket or container.

use job_contract::keys::{Area, ObjectKey};

/// The key of an object's name in a bucket. The name begins with an area.
pub(crate) fn key_of(name: &str) -> Option<ObjectKey> {
    Area::ALL.into_iter().find_map(|area| {
        let path = name.strip_prefix(area.bucket_prefix())?.strip_prefix('/')?;
        let is_sound = path
            .split('/')
            .all(|segment| !matches!(segment, "" | "." | ".."));
        is_sound.then(|| ObjectKey {
            area,
            path: path.to_owned(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_differ_from_texts_that_only_resemble_them() {
        let key = key_of("tfstate/o/w/1/s/terraformLibrary.tfPlan").unwrap();
        assert_eq!(key, ObjectKey::plan("o", "w", "1", "s"));
        assert_eq!(
            key_of("tfoutput/o/1/s.tfoutput"),
            Some(ObjectKey::step_output("o", "1", "s"))
        );
        for other in [
            "tfstate",
            "tfstate/",
            "tfstates/a",
            "tfstate/../tfoutput/a",
            "tfstate/a//b",
            "a/tfstate/b",
        ] {
            assert_eq!(key_of(other), None, "{other}");
        }
    }
}
