//! Where services of Google are.

/// Whether a host is one of Google's services. Nobody else gets a token for them.
pub fn is_service_host(host: &str) -> bool {
    host == "googleapis.com" || host.ends_with(".googleapis.com")
}
