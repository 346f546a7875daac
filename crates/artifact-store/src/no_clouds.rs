//! In the place of `clouds`, in a build without it: every store of a cloud is refused.

use std::sync::Arc;

use crate::error::StoreError;
use crate::request::RequestTiming;
use crate::service::ServedService;
use crate::settings::{AzureSettings, GcsSettings, S3Settings};

type Opened = Result<Arc<dyn ServedService>, StoreError>;

pub(crate) fn open_s3(_: &S3Settings, _: &RequestTiming) -> Opened {
    Err(StoreError::LeftOut { service: "S3" })
}

pub(crate) fn open_azure(_: &AzureSettings, _: &RequestTiming) -> Opened {
    Err(StoreError::LeftOut {
        service: "Azure Blob Storage",
    })
}

pub(crate) fn open_gcs(_: &GcsSettings, _: &RequestTiming) -> Opened {
    Err(StoreError::LeftOut {
        service: "Google Cloud Storage",
    })
}
