//! A job document as it was received, and what it says. Launchers hand on the received bytes: what they do not know
//! reaches the executor all the same.

use std::fmt;
use std::ops::Deref;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::job::JobData;

/// Job documents are small and short-lived: the default trades little size for little time.
const ZSTD_LEVEL: i32 = 3;

/// The JSON of a job document, and the job it describes.
#[derive(Clone, PartialEq)]
pub struct Document {
    json: Vec<u8>,
    job: JobData,
}

impl Document {
    /// Reads a document and keeps its bytes.
    ///
    /// # Errors
    /// Says where the bytes are no job document. The message may quote the document, so only its place may be shown.
    pub fn from_json(json: Vec<u8>) -> Result<Self, serde_json::Error> {
        let job = serde_json::from_slice(&json)?;
        Ok(Self { json, job })
    }

    /// The document of a job that this program describes itself.
    #[must_use]
    pub fn written(job: &JobData) -> Self {
        let json = serde_json::to_vec(job);
        Self {
            json: json.expect("a job document has string keys and no failing serialiser"),
            job: job.clone(),
        }
    }

    /// The bytes, as they were received.
    #[must_use]
    pub fn json(&self) -> &[u8] {
        &self.json
    }

    /// The job without its document.
    #[must_use]
    pub fn into_job(self) -> JobData {
        self.job
    }

    /// The form that every executor release reads: standard base64 on one line.
    #[must_use]
    pub fn encode(&self) -> String {
        STANDARD.encode(&self.json)
    }

    /// The same of compressed bytes; only Mayfly's executor reads it.
    ///
    /// # Errors
    /// Fails only when the compressor cannot allocate.
    pub fn encode_compressed(&self) -> std::io::Result<String> {
        Ok(STANDARD.encode(zstd::bulk::compress(&self.json, ZSTD_LEVEL)?))
    }
}

impl Deref for Document {
    type Target = JobData;

    fn deref(&self) -> &JobData {
        &self.job
    }
}

/// Shows which job this is, and nothing that could be a secret.
impl fmt::Debug for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.job, f)
    }
}
