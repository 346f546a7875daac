//! Requests to services of AWS: where a service is, and the signature of what is posted there.

use std::time::SystemTime;

use job_contract::aws::service_host;
use reqwest::{Method, Url};

use super::sign::{Keys, Scope, sign};
use crate::error::{ErrorClass, ReadError};
use crate::http::Request;
use crate::reference::{StoreKind, is_region};

/// The root of a service in a region.
pub fn service_url(service: &str, region: &str) -> Result<Url, ReadError> {
    let wrong = || {
        ReadError::new(
            StoreKind::Aws,
            ErrorClass::NotConfigured,
            "the region is no name of a region",
        )
    };
    if !is_region(region) {
        return Err(wrong());
    }
    let host = service_host(service, region);
    Url::parse(&format!("https://{host}/")).map_err(|_| wrong())
}

/// A signed request that posts a body to the root of a service. The headers are signed too.
pub(super) fn signed(
    scope: Scope<'_>,
    media_type: &'static str,
    headers: &[(&'static str, &str)],
    body: String,
    keys: &Keys,
) -> Result<Request, ReadError> {
    let url = service_url(scope.service, scope.region)?;
    let mut all = vec![("content-type", media_type)];
    all.extend(headers);
    let signed = sign(&url, &all, &body, keys, scope, SystemTime::now());
    let request = Request::new(Method::POST, url).body(media_type, body);
    let headers = signed
        .into_iter()
        .filter(|(name, _)| *name != "content-type");
    Ok(headers.fold(request, |request, (name, value)| {
        request.header(name, value)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_region_leads_elsewhere() {
        let url = service_url("sts", "eu-west-1").unwrap();
        assert_eq!(url.as_str(), "https://sts.eu-west-1.amazonaws.com/");
        assert!(service_url("sts", "evil.com/").is_err());
    }
}
