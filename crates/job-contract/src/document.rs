//! A job document with its received bytes. The launcher passes these bytes on, so that properties it does not know reach the
//! executor.

use std::fmt;
use std::ops::Deref;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::job::JobData;
use crate::zstd_frame;

/// The JSON of a job document, and its job.
#[derive(Clone, PartialEq)]
pub struct Document {
    json: Vec<u8>,
    job: JobData,
}

impl Document {
    /// Reads a document and keeps its bytes.
    ///
    /// # Errors
    /// The bytes are no job document. The message may quote the document, so callers may show only its position.
    pub fn from_json(json: Vec<u8>) -> Result<Self, serde_json::Error> {
        let job = serde_json::from_slice(&json)?;
        Ok(Self { json, job })
    }

    /// Writes the document of a job.
    #[must_use]
    pub fn written(job: &JobData) -> Self {
        let json = serde_json::to_vec(job);
        Self {
            json: json.expect("a job document has string keys and no failing serialiser"),
            job: job.clone(),
        }
    }

    /// The received bytes.
    #[must_use]
    pub fn json(&self) -> &[u8] {
        &self.json
    }

    /// The job without its document.
    #[must_use]
    pub fn into_job(self) -> JobData {
        self.job
    }

    /// Encodes the document as every executor release reads it: standard base64 on one line.
    #[must_use]
    pub fn encode(&self) -> String {
        STANDARD.encode(&self.json)
    }

    /// Compresses and encodes the document. Only Mayfly's executor reads the result.
    ///
    /// # Errors
    /// Fails when the compressor cannot allocate, and in a build without zstd.
    pub fn encode_compressed(&self) -> std::io::Result<String> {
        Ok(STANDARD.encode(zstd_frame::compress(&self.json)?))
    }
}

impl Deref for Document {
    type Target = JobData;

    fn deref(&self) -> &JobData {
        &self.job
    }
}

/// Shows the ids of the job, but no value that could be a secret.
impl fmt::Debug for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.job, f)
    }
}
