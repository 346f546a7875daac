//! What a state has, without its values. It decides whether a state that the tool could not store may take the place of the stored
//! one.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::io::{self, BufReader, Read};

use job_contract::encoding::hex;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::terraform::hcl::quote;
use crate::terraform::raw_state::RawState;

/// What a state has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StateSummary {
    pub(crate) serial: u64,
    lineage: String,
    /// Its objects are not known.
    pub(crate) is_encrypted: bool,
    pub(crate) sha256: String,
    /// Digests of the managed objects, by address.
    objects: BTreeMap<String, u64>,
}

impl StateSummary {
    /// Reads a state of any size; `None` if it is not a whole one.
    pub(crate) fn read(content: impl Read) -> Option<Self> {
        let mut content = Hashed(content, Sha256::new());
        let document: Document = serde_json::from_reader(BufReader::new(&mut content)).ok()?;
        let is_encrypted = document.encrypted_data.is_some();
        // A first state that the tool could not begin to store has no lineage yet.
        let is_state = !document.lineage.is_empty() || document.resources.is_some();
        if !is_state && !is_encrypted {
            return None;
        }
        let mut objects = BTreeMap::new();
        // Data is read again each time.
        let resources = document.resources.unwrap_or_default().into_iter();
        for resource in resources.filter(|resource| resource.mode == "managed") {
            let instances = resource.instances.iter().flatten();
            for instance in instances.filter(|instance| instance.deposed.is_empty()) {
                let object = digest_of(&(&resource.kind, instance.attributes));
                objects.insert(resource.address(&instance.index_key), object);
            }
        }
        Some(Self {
            serial: document.serial,
            lineage: document.lineage,
            is_encrypted,
            sha256: hex(&content.1.finalize()),
            objects,
        })
    }

    /// Whether it has an object of this address.
    pub(crate) fn has(&self, address: &str) -> bool {
        self.objects.contains_key(address)
    }

    /// Addresses of objects that an earlier state has and this one lacks. What its run has changed may be lacking. What the
    /// configuration has moved is there under another address.
    pub(crate) fn forgotten(
        &self,
        earlier: &Self,
        is_changed: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let is_there = |address: &str, object: &u64| {
            self.has(address) || self.objects.values().any(|own| own == object)
        };
        let objects = earlier.objects.iter();
        objects
            .filter(|&(address, object)| !is_changed(address) && !is_there(address, object))
            .map(|(address, _)| address.clone())
            .collect()
    }

    /// Decides whether this state may take the place of the stored one, and with which serial: the next one, so that the tool refuses
    /// it if somebody else stores a state first. `known` is the digest of the stored state that its run had read. A state that the run
    /// has stored since differs only in what the run has changed.
    pub(crate) fn follow(
        &self,
        stored: Option<&Self>,
        known: Option<&str>,
        is_changed: impl Fn(&str) -> bool,
    ) -> Result<u64, &'static str> {
        let Some(stored) = stored else {
            return Ok(self.serial);
        };
        if stored.lineage != self.lineage {
            return Err("the stored state has another lineage");
        }
        let has_more = |one: &Self, other: &Self| {
            let mut objects = one.objects.iter();
            objects.any(|(address, object)| {
                other.objects.get(address) != Some(object) && !is_changed(address)
            })
        };
        let is_own = || {
            let is_readable = !self.is_encrypted && !stored.is_encrypted;
            is_readable
                && stored.serial <= self.serial
                && !has_more(stored, self)
                && !has_more(self, stored)
        };
        if known != Some(stored.sha256.as_str()) && !is_own() {
            return Err("somebody has changed the stored state since the run has read it");
        }
        // The serial of an encrypted state is a part of what is encrypted.
        if !self.is_encrypted {
            Ok(stored.serial + 1)
        } else if self.serial > stored.serial {
            Ok(self.serial)
        } else {
            Err("it is encrypted, and its serial is not above that of the stored state")
        }
    }
}

/// The same state with another serial, and every other byte as it is: a parser could round large numbers.
pub(crate) fn with_serial(state: &[u8], serial: u64) -> Option<Vec<u8>> {
    // It comes before everything that could have a member of this name.
    const KEY: &[u8] = b"\"serial\":";
    let begin = state.windows(KEY.len()).position(|text| text == KEY)? + KEY.len();
    let rest = &state[begin..];
    let is_number = |byte: &u8| byte.is_ascii_digit() || byte.is_ascii_whitespace();
    let end = begin + rest.iter().position(|byte| !is_number(byte))?;
    let number = format!(" {serial}");
    let next = [&state[..begin], number.as_bytes(), &state[end..]].concat();
    let (before, after) = (RawState::parse(state)?, RawState::parse(&next)?);
    (after.serial == serial && after.lineage == before.lineage).then_some(next)
}

/// A reader that computes the digest of what it reads.
struct Hashed<R>(R, Sha256);

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.0.read(buffer)?;
        self.1.update(&buffer[..length]);
        Ok(length)
    }
}

/// The parts of a state file (format version 4) that a summary needs.
#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    serial: u64,
    #[serde(default)]
    lineage: String,
    resources: Option<Vec<Resource>>,
    encrypted_data: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Resource {
    #[serde(default)]
    module: String,
    #[serde(default)]
    mode: String,
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    name: String,
    instances: Option<Vec<Instance>>,
}

#[derive(Deserialize)]
struct Instance {
    #[serde(default)]
    index_key: Value,
    /// The key of an object that a replacement has left.
    #[serde(default)]
    deposed: String,
    #[serde(default, deserialize_with = "digest")]
    attributes: u64,
}

impl Resource {
    /// The address of an instance, as the tool writes it.
    fn address(&self, index: &Value) -> String {
        let index = match index {
            Value::Null => String::new(),
            Value::String(key) => format!("[{}]", quote(key)),
            key => format!("[{key}]"),
        };
        let dot = if self.module.is_empty() { "" } else { "." };
        format!("{}{dot}{}.{}{index}", self.module, self.kind, self.name)
    }
}

/// Nothing of the value is kept, because states may be large. The tool writes members in one order.
fn digest<'de, D: Deserializer<'de>>(value: D) -> Result<u64, D::Error> {
    let value = Value::deserialize(value)?;
    Ok(digest_of(&value.to_string()))
}

fn digest_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    /// A state with an object of this value for each name.
    fn state(serial: u64, lineage: &str, objects: &[(&str, &str)]) -> StateSummary {
        let resources: Vec<_> = objects
            .iter()
            .map(|(name, value)| {
                let attributes = json!({"id": name, "input": {"value": value}});
                json!({"mode": "managed", "type": "t", "name": name, "instances": [{"attributes": attributes}]})
            })
            .collect();
        let text =
            json!({"version": 4, "serial": serial, "lineage": lineage, "resources": resources});
        StateSummary::read(text.to_string().as_bytes()).unwrap()
    }

    /// The run had read serial 7 of lineage `l` with `a`, and was to change `b`.
    #[rstest]
    #[case::nothing_is_stored(8, None, Ok(8))]
    #[case::the_read_one(8, Some(state(7, "l", &[("a", "0")])), Ok(8))]
    #[case::the_read_one_with_the_same_serial(7, Some(state(7, "l", &[("a", "0")])), Ok(8))]
    #[case::the_read_one_after_failed_attempts(9, Some(state(7, "l", &[("a", "0")])), Ok(8))]
    #[case::what_the_run_has_stored(9, Some(state(8, "l", &[("a", "1"), ("b", "half")])), Ok(9))]
    #[case::another_lineage(8, Some(state(7, "m", &[("a", "0")])), Err("another lineage"))]
    #[case::changed(9, Some(state(8, "l", &[("a", "other"), ("b", "2")])), Err("somebody"))]
    #[case::with_more(9, Some(state(8, "l", &[("a", "1"), ("c", "3")])), Err("somebody"))]
    #[case::with_less(9, Some(state(8, "l", &[("b", "2")])), Err("somebody"))]
    #[case::later(8, Some(state(9, "l", &[("a", "1"), ("b", "2")])), Err("somebody"))]
    fn a_state_follows_only_what_its_run_has_read_or_stored(
        #[case] serial: u64,
        #[case] stored: Option<StateSummary>,
        #[case] expected: Result<u64, &str>,
    ) {
        let own = state(serial, "l", &[("a", "1"), ("b", "2")]);
        let read = state(7, "l", &[("a", "0")]).sha256;
        let found = own.follow(stored.as_ref(), Some(&read), |address| address == "t.b");
        match (found, expected) {
            (Err(found), Err(part)) => assert!(found.contains(part), "{found}"),
            (found, expected) => assert_eq!(found, expected),
        }
    }

    #[test]
    fn objects_that_were_neither_destroyed_nor_moved_are_forgotten() {
        let earlier = state(7, "l", &[("a", "1"), ("b", "2"), ("c", "3")]);
        let moved = json!({"version": 4, "serial": 8, "lineage": "l", "resources": [
            {"module": "module.m[\"x\"]", "mode": "managed", "type": "t", "name": "n",
             "instances": [{"index_key": "k", "attributes": {"id": "a", "input": {"value": "1"}}}]}]});
        let part = StateSummary::read(moved.to_string().as_bytes()).unwrap();
        assert!(part.has("module.m[\"x\"].t.n[\"k\"]") && !part.has("t.a"));
        let forgotten = part.forgotten(&earlier, |address| address == "t.b");
        assert_eq!(forgotten, ["t.c"]);
    }

    #[test]
    fn only_the_serial_changes() {
        let text = "{\n  \"version\": 4,\n  \"serial\": 7,\n  \"lineage\": \"l\",\n  \"outputs\": {\"serial\": \
                    {\"value\": 123456789012345678901234567890, \"type\": \"number\"}}\n}\n";
        let next = with_serial(text.as_bytes(), 12).unwrap();
        let expected = text.replace("\"serial\": 7", "\"serial\": 12");
        assert_eq!(String::from_utf8(next).unwrap(), expected);
        assert_eq!(with_serial(b"{\"lineage\":\"l\"}", 12), None);
        assert_eq!(
            StateSummary::read(&b"{\"version\": 4, \"serial\": 7, \"lin"[..]),
            None
        );
        let first = state(0, "", &[("a", "1")]);
        assert_eq!(first.follow(None, None, |_| false), Ok(0));
    }
}
