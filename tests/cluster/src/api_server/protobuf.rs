//! The two messages Helm sends in protobuf: the Secrets it keeps its records in, and what it says as it deletes them.
//! Answers are JSON, which its client takes as well.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value, json};

use super::status::ApiError;

/// The media type.
pub(crate) const MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf";

/// What every such body begins with.
const MAGIC: &[u8] = b"k8s\0";

/// One field of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content<'b> {
    Number(u64),
    Bytes(&'b [u8]),
}

impl Content<'_> {
    /// Fields that were not set are sent too, when their type cannot say so.
    fn is_unset(self) -> bool {
        matches!(self, Self::Number(0) | Self::Bytes(&[]))
    }

    fn text(self) -> Option<String> {
        match self {
            Self::Bytes(bytes) => String::from_utf8(bytes.to_vec()).ok(),
            Self::Number(_) => None,
        }
    }
}

/// Reads a body as the object its JSON would be.
pub(crate) fn decode(body: &[u8]) -> Result<Value, ApiError> {
    object(body).ok_or_else(|| {
        ApiError::bad_request("this server reads only Secrets and DeleteOptions in protobuf")
    })
}

fn object(body: &[u8]) -> Option<Value> {
    let (mut version, mut kind, mut raw) = (String::new(), String::new(), &[] as &[u8]);
    for (number, content) in fields(body.strip_prefix(MAGIC)?)? {
        match (number, content) {
            (1, Content::Bytes(of)) => {
                for (number, content) in fields(of)? {
                    match number {
                        1 => version = content.text()?,
                        2 => kind = content.text()?,
                        _ => return None,
                    }
                }
            }
            (2, Content::Bytes(of)) => raw = of,
            _ if content.is_unset() => {}
            _ => return None,
        }
    }
    let mut object = match kind.as_str() {
        "Secret" => secret(raw)?,
        "DeleteOptions" => delete_options(raw)?,
        _ => return None,
    };
    object["apiVersion"] = version.into();
    object["kind"] = kind.into();
    Some(object)
}

fn secret(message: &[u8]) -> Option<Value> {
    let mut secret = json!({});
    for (number, content) in fields(message)? {
        match (number, content) {
            (1, Content::Bytes(of)) => secret["metadata"] = metadata(of)?,
            (2, Content::Bytes(of)) => {
                let (key, value) = entry(of)?;
                secret["data"][key] = BASE64_STANDARD.encode(value).into();
            }
            (3, content) => secret["type"] = content.text()?.into(),
            _ => return None,
        }
    }
    Some(secret)
}

fn metadata(message: &[u8]) -> Option<Value> {
    let mut metadata = json!({});
    for (number, content) in fields(message)? {
        let name = match number {
            // Labels and annotations.
            11 | 12 => {
                let Content::Bytes(of) = content else {
                    return None;
                };
                let (key, value) = entry(of)?;
                let of = if number == 11 {
                    "labels"
                } else {
                    "annotations"
                };
                metadata[of][key] = String::from_utf8(value.to_vec()).ok()?.into();
                continue;
            }
            _ if content.is_unset() => continue,
            1 => "name",
            3 => "namespace",
            5 => "uid",
            6 => "resourceVersion",
            _ => return None,
        };
        metadata[name] = content.text()?.into();
    }
    Some(metadata)
}

fn delete_options(message: &[u8]) -> Option<Value> {
    let mut options = Map::new();
    for (number, content) in fields(message)? {
        match (number, content) {
            (1, Content::Number(seconds)) => {
                options.insert("gracePeriodSeconds".into(), seconds.into())
            }
            (4, content) => options.insert("propagationPolicy".into(), content.text()?.into()),
            _ if content.is_unset() => None,
            _ => return None,
        };
    }
    Some(options.into())
}

/// An entry of a map.
fn entry(message: &[u8]) -> Option<(String, &[u8])> {
    let (mut key, mut value) = (String::new(), &[] as &[u8]);
    for (number, content) in fields(message)? {
        match (number, content) {
            (1, content) => key = content.text()?,
            (2, Content::Bytes(of)) => value = of,
            _ => return None,
        }
    }
    Some((key, value))
}

/// The fields of a message, in their order; nothing when it is none.
fn fields(mut message: &[u8]) -> Option<Vec<(u64, Content<'_>)>> {
    let mut found = Vec::new();
    while !message.is_empty() {
        let tag = number(&mut message)?;
        let content = match tag & 7 {
            0 => Content::Number(number(&mut message)?),
            2 => {
                let length = usize::try_from(number(&mut message)?).ok()?;
                let (bytes, rest) = message.split_at_checked(length)?;
                message = rest;
                Content::Bytes(bytes)
            }
            _ => return None,
        };
        found.push((tag >> 3, content));
    }
    Some(found)
}

/// Takes a number of variable length from the front.
fn number(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = message.split_first()?;
        *message = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field of bytes.
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let length = u8::try_from(bytes.len()).unwrap();
        assert!(length < 0x80);
        [&[number << 3 | 2, length], bytes].concat()
    }

    fn body(kind: &str, raw: &[u8]) -> Vec<u8> {
        let of = [field(1, b"v1"), field(2, kind.as_bytes())].concat();
        [
            MAGIC,
            &field(1, &of),
            &field(2, raw),
            &field(3, b""),
            &field(4, b""),
        ]
        .concat()
    }

    #[test]
    fn a_secret_is_read_as_its_json_would_be() {
        let label = [field(1, b"owner"), field(2, b"helm")].concat();
        // As Go writes it: what is not set too.
        let metadata = [
            field(1, b"a"),
            field(2, b""),
            field(8, b""),
            field(11, &label),
        ]
        .concat();
        let data = [field(1, b"release"), field(2, b"\xff\x00")].concat();
        let secret = [
            field(1, &metadata),
            field(2, &data),
            field(3, b"helm.sh/release.v1"),
        ]
        .concat();
        assert_eq!(
            decode(&body("Secret", &secret)).unwrap(),
            json!({"apiVersion": "v1", "kind": "Secret", "type": "helm.sh/release.v1",
                "metadata": {"name": "a", "labels": {"owner": "helm"}}, "data": {"release": "/wA="}})
        );
    }

    #[test]
    fn options_are_read_and_what_is_not_known_is_refused() {
        let options = [vec![1 << 3, 0xac, 0x02], field(4, b"Background")].concat();
        let read = decode(&body("DeleteOptions", &options)).unwrap();
        assert_eq!(
            (&read["gracePeriodSeconds"], &read["propagationPolicy"]),
            (&json!(300), &json!("Background"))
        );
        for wrong in [
            body("Pod", &[]),
            body("Secret", &field(9, b"what")),
            body("Secret", &[0x0a, 0x7f]),
            b"{}".to_vec(),
        ] {
            assert_eq!(decode(&wrong).unwrap_err().code, 400);
        }
    }
}
