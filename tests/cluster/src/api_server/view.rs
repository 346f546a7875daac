//! The form an answer takes: whole objects, or their metadata only.

use serde_json::{Value, json};

use super::status::ApiError;

/// What `Accept` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    Whole,
    Metadata,
}

impl View {
    pub(crate) fn from_accept(accept: &str) -> Result<Self, ApiError> {
        if accept.trim().is_empty() {
            return Ok(Self::Whole);
        }
        for choice in accept.split(',') {
            let mut parts = choice.split(';').map(str::trim);
            let media = parts.next().unwrap_or("");
            if !matches!(media, "application/json" | "*/*" | "application/*") {
                continue;
            }
            match parts.find_map(|part| part.strip_prefix("as=")) {
                None => return Ok(Self::Whole),
                Some("PartialObjectMetadata" | "PartialObjectMetadataList") => {
                    return Ok(Self::Metadata);
                }
                Some(_) => {}
            }
        }
        Err(ApiError::not_acceptable())
    }

    pub(crate) fn object(self, object: &Value) -> Value {
        match self {
            Self::Whole => object.clone(),
            Self::Metadata if object["kind"] == "Status" => object.clone(),
            Self::Metadata => json!({
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"],
            }),
        }
    }

    /// An object within a list, which says its type once for all (as real servers do for whole objects).
    pub(crate) fn item(self, object: &Value) -> Value {
        let mut shown = self.object(object);
        if let (Self::Whole, Some(fields)) = (self, shown.as_object_mut()) {
            fields.shift_remove("kind");
            fields.shift_remove("apiVersion");
        }
        shown
    }
}
