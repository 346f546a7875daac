//! The object stores of clouds. Only this part of the crate knows `object_store`. A build without the feature `full` has
//! `no_clouds` in its place.

mod answers;
mod azure;
mod conditional;
mod connector;
mod gcs;
mod meaning;
mod reference;
mod remote;
mod s3;
mod session;
mod state_object;

use std::sync::Arc;

use crate::error::StoreError;
use crate::request::RequestTiming;
use crate::service::ServedService;
use crate::settings::{AzureSettings, GcsSettings, S3Settings};

use self::azure::Azure;
use self::gcs::Gcs;
use self::s3::S3;

type Opened = Result<Arc<dyn ServedService>, StoreError>;

pub(crate) fn open_s3(settings: &S3Settings, timing: &RequestTiming) -> Opened {
    Ok(Arc::new(S3::open(settings, timing)?))
}

pub(crate) fn open_azure(settings: &AzureSettings, timing: &RequestTiming) -> Opened {
    Ok(Arc::new(Azure::open(settings, timing)?))
}

pub(crate) fn open_gcs(settings: &GcsSettings, timing: &RequestTiming) -> Opened {
    Ok(Arc::new(Gcs::open(settings, timing)?))
}
