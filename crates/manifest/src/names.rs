//! Names of objects. The Job's name contains only job and step, so a second delivery finds the first one's Job. No two
//! Jobs name the same Secret, so the launcher need not read a Secret to find its Job.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

use super::check;

/// How many characters of a job and step id stay readable in a hashed name.
const READABLE: usize = 24;

/// Returns the name of the Job. It is `job-<jobId>-<stepId>` if that is a DNS label. Otherwise it is a readable
/// beginning and a hash of the pair.
///
/// Different pairs never share a name. In the plain form, the job id has only digits, so its end is clear. The hashed
/// form has a letter where the plain form has a digit.
pub fn job_name(job_id: &str, step_id: &str) -> String {
    let plain = format!("job-{job_id}-{step_id}");
    let certain = !job_id.is_empty() && job_id.bytes().all(|b| b.is_ascii_digit());
    if certain && !step_id.is_empty() && check::dns_label(&plain).is_ok() {
        return plain;
    }
    let readable: String = format!("{job_id}-{step_id}")
        .chars()
        .map(|c| c.to_ascii_lowercase())
        .map(|c| {
            if c.is_ascii_lowercase() || c.is_ascii_digit() {
                c
            } else {
                '-'
            }
        })
        .take(READABLE)
        .collect();
    format!("job-x{readable}-{}", hash(job_id, step_id))
}

/// Returns the name of a Job's Secret: the Job's name and the id of the attempt to create the Job.
pub fn secret_name(job_name: &str, attempt: &str) -> String {
    format!("{job_name}-{attempt}")
}

fn hash(job_id: &str, step_id: &str) -> String {
    let mut hasher = Sha256::new();
    hasher.update((job_id.len() as u64).to_be_bytes());
    hasher.update(job_id.as_bytes());
    hasher.update(step_id.as_bytes());
    let mut text = String::new();
    for byte in &hasher.finalize()[..16] {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn usual_ids_stay_readable() {
        assert_eq!(
            job_name("412", "5a5e1f0b-9c3f-4a55-9f0e-3d0f3b8f0101"),
            "job-412-5a5e1f0b-9c3f-4a55-9f0e-3d0f3b8f0101"
        );
    }

    #[test]
    fn unusual_ids_get_a_name_of_their_own() {
        let long = "s".repeat(128);
        let names: std::collections::BTreeSet<String> = [
            ("412", "STEP"),
            ("412", "step"),
            ("412", "step."),
            ("412", "step-"),
            ("412", long.as_str()),
            ("-412", "step"),
            ("1", "2-3"),
            ("1-2", "3"),
            ("", ""),
            ("1", ""),
        ]
        .into_iter()
        .map(|(job, step)| job_name(job, step))
        .collect();
        assert_eq!(names.len(), 10);
        for name in &names {
            assert!(check::dns_label(name).is_ok(), "{name}");
        }
    }

    proptest! {
        #[test]
        fn every_name_is_a_dns_label(job in "\\PC{0,40}", step in "\\PC{0,140}") {
            let name = job_name(&job, &step);
            prop_assert!(check::dns_label(&name).is_ok(), "{}", name);
            prop_assert_eq!(name, job_name(&job, &step));
        }

        /// Short ids over few letters, so that pairs which look alike are met often.
        #[test]
        fn different_pairs_have_different_names(
            a in ("[-1x]{0,4}", "[-1xX.]{0,4}"),
            b in ("[-1x]{0,4}", "[-1xX.]{0,4}"),
        ) {
            prop_assume!(a != b);
            prop_assert_ne!(job_name(&a.0, &a.1), job_name(&b.0, &b.1));
        }
    }
}
