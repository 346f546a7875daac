//! Reads the job document that `run`, `launch` and `render` are given with `-f`.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use job_contract::encoding::{self, MAX_DOCUMENT_BYTES};
use job_contract::{Document, Exit};

use crate::failure::Failure;

/// Stands for standard input.
pub(crate) const STDIN: &str = "-";

/// The document in `path`, JSON or encoded, with all that every step needs.
pub(crate) fn read(path: &Path) -> Result<Document, Failure> {
    let name = format!("the job document `{}`", path.display());
    let unusable = |what| Failure::new(Exit::BadJobData, format!("{name} cannot be {what}"));
    let text = read_limited(path).map_err(|error| {
        let text = format!("could not read {name}");
        Failure::new(Exit::BadConfiguration, text).because(error)
    })?;
    let job = encoding::document(&text).map_err(|error| unusable("decoded").because(error))?;
    job.validate()
        .map_err(|error| unusable("run").because(error))?;
    Ok(job)
}

/// Twice the limit of the decoder: what is cut here is too large in every encoding.
fn read_limited(path: &Path) -> io::Result<Vec<u8>> {
    let limit = 2 * MAX_DOCUMENT_BYTES as u64;
    let mut text = Vec::new();
    if path == Path::new(STDIN) {
        io::stdin().lock().take(limit).read_to_end(&mut text)?;
    } else {
        File::open(path)?.take(limit).read_to_end(&mut text)?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;
    use std::fs;

    #[test]
    fn faults_are_named_with_their_place_and_without_values() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("job.json");
        for (text, expected, exit) in [
            (
                "{\n  \"accessToken\": \"hunter2\",\n  \"refresh\": \"hunter2\"\n}",
                "line 3",
                Exit::BadJobData,
            ),
            (
                "{\"type\":\"terraformPlan\"}",
                "organizationId",
                Exit::BadJobData,
            ),
            ("", "empty", Exit::BadJobData),
            ("not base64!", "base64", Exit::BadJobData),
        ] {
            fs::write(&path, text).unwrap();
            let error = read(&path).unwrap_err();
            let message = format!("{error}: {}", error.source().unwrap());
            assert!(message.contains(expected), "{message}");
            assert!(!message.contains("hunter2"), "{message}");
            assert_eq!(error.exit, exit);
        }
        let absent = read(&temp.path().join("absent")).unwrap_err();
        assert_eq!(absent.exit, Exit::BadConfiguration);
    }
}
