//! Reads the tool's JSON stream. Every event becomes lines in the run's log, and updates the structured output
//! (contract 7.6, Appendix B).

use std::fmt::Write as _;

use bytes::Bytes;
use run_log::LogWriter;
use serde::de::IgnoredAny;
use serde_json::{Deserializer, Value};

use crate::process::Consumer;
use crate::terraform::event_state::EventState;
use crate::terraform::raw_state::MAX_DOCUMENT_BYTES;
use crate::terraform::state_summary::StateSummary;

/// The longest event that is parsed, because an event is kept in memory. Known events are much smaller.
const MAX_EVENT_BYTES: usize = 16 * 1024 * 1024;

/// Message of the event in which the tool prints a state that no disk accepted.
const STATE_PRINTED: &str = "Emergency state dump";
/// The beginning of such a state without JSON events. Terraform prints many lines.
const STATE_BEGINS: &[u8] = b"{\n  \"version\": ";
/// OpenTofu prints one line, plain or encrypted.
const STATE_LINE_BEGINS: [&[u8]; 2] = [b"{\"version\":", b"{\"serial\":"];

/// Consumes the stream of one operation.
#[derive(Debug)]
pub struct EventStream {
    log: LogWriter,
    partial: Vec<u8>,
    /// The rest of an over-long line goes to the log unchanged.
    overflowing: bool,
    /// Plain lines that may be a state, from its first line on.
    state: Vec<u8>,
    events: EventState,
}

impl EventStream {
    /// Writes to `log`, and updates `events`.
    pub const fn new(log: LogWriter, events: EventState) -> Self {
        Self {
            log,
            partial: Vec::new(),
            overflowing: false,
            state: Vec::new(),
            events,
        }
    }

    /// Ends the stream. An unterminated last line counts too.
    pub async fn finish(mut self) {
        if !self.partial.is_empty() {
            let line = std::mem::take(&mut self.partial);
            let mut text = Vec::new();
            self.line(&line, &mut text);
            self.log.write(&text).await;
        }
        // A part of a state is useless, and a state must not be in a log.
        if !self.state.starts_with(STATE_BEGINS) {
            self.log.write(&self.state).await;
        }
        self.log.close().await;
    }

    fn line(&mut self, line: &[u8], text: &mut Vec<u8>) {
        if line == b"{" || !self.state.is_empty() {
            self.state_line(line, text);
        } else if is_state_line(line) {
            self.events.state(Bytes::copy_from_slice(line));
        } else if let Ok(event @ Value::Object(_)) = serde_json::from_slice::<Value>(line) {
            if let Some(console) = console_text(&event) {
                text.extend_from_slice(console.as_bytes());
                text.push(b'\n');
            }
            if let Some(state) = printed_state(&event, line) {
                self.events.state(state);
            }
            self.events.event(&event);
        } else {
            self.events.line(line);
            text.extend_from_slice(line);
            text.push(b'\n');
        }
    }

    /// Keeps a printed state in the event state. Lines that turn out to be something else go to the log unchanged.
    fn state_line(&mut self, line: &[u8], text: &mut Vec<u8>) {
        self.state.extend_from_slice(line);
        self.state.push(b'\n');
        let begun = &self.state[..self.state.len().min(STATE_BEGINS.len())];
        let may_be_state =
            STATE_BEGINS.starts_with(begun) && self.state.len() <= MAX_DOCUMENT_BYTES;
        if may_be_state && line != b"}" {
            return;
        }
        let state = std::mem::take(&mut self.state);
        if may_be_state && is_state(&state) {
            self.events.state(state.into());
        } else {
            text.extend_from_slice(&state);
        }
    }
}

/// Whether a line is a whole state in OpenTofu's format.
fn is_state_line(line: &[u8]) -> bool {
    STATE_LINE_BEGINS
        .iter()
        .any(|begin| line.starts_with(begin))
        && is_state(line)
}

fn is_state(text: &[u8]) -> bool {
    StateSummary::read(text).is_some()
}

/// The state in an event, byte for byte: a parser could round large numbers.
fn printed_state(event: &Value, line: &[u8]) -> Option<Bytes> {
    const KEY: &[u8] = b"\"state\":";
    if event["@message"] != STATE_PRINTED || !event["state"].is_object() {
        return None;
    }
    let at = line.windows(KEY.len()).position(|text| text == KEY)?;
    let rest = &line[at + KEY.len()..];
    let mut values = Deserializer::from_slice(rest).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    Some(Bytes::copy_from_slice(&rest[..values.byte_offset()]))
}

/// How many bytes of an event are kept. The message is among the first properties of an event.
fn limit(partial: &[u8]) -> usize {
    let beginning = String::from_utf8_lossy(&partial[..partial.len().min(256)]);
    let is_state = |begin: &&[u8]| partial.starts_with(begin);
    if beginning.contains(STATE_PRINTED) || STATE_LINE_BEGINS.iter().any(is_state) {
        MAX_DOCUMENT_BYTES
    } else {
        MAX_EVENT_BYTES
    }
}

impl Consumer for EventStream {
    async fn consume(&mut self, chunk: &[u8]) {
        let mut text = Vec::with_capacity(chunk.len());
        for piece in chunk.split_inclusive(|byte| *byte == b'\n') {
            let complete = piece.ends_with(b"\n");
            if self.overflowing {
                text.extend_from_slice(piece);
                self.overflowing = !complete;
            } else if complete && self.partial.is_empty() {
                self.line(trim_end(piece), &mut text);
            } else {
                self.partial.extend_from_slice(piece);
                if complete {
                    let line = std::mem::take(&mut self.partial);
                    self.line(trim_end(&line), &mut text);
                } else if self.partial.len() > limit(&self.partial) {
                    text.append(&mut self.partial);
                    self.overflowing = true;
                }
            }
        }
        self.log.write(&text).await;
    }
}

fn trim_end(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// The text of an event for people. The message of a diagnostic is only its title, so the other text of the tool's
/// plain output is added.
pub fn console_text(event: &Value) -> Option<String> {
    let message = event["@message"].as_str();
    if event["type"] == "diagnostic" && event["diagnostic"].is_object() {
        return Some(diagnostic_text(&event["diagnostic"], message));
    }
    message.map(str::to_owned)
}

fn diagnostic_text(diagnostic: &Value, message: Option<&str>) -> String {
    let title = match (
        diagnostic["severity"].as_str(),
        diagnostic["summary"].as_str(),
    ) {
        (Some("error"), Some(summary)) => format!("Error: {summary}"),
        (Some("warning"), Some(summary)) => format!("Warning: {summary}"),
        _ => message.unwrap_or_default().to_owned(),
    };
    let mut text = format!("\n{title}\n");
    if let Some(address) = diagnostic["address"]
        .as_str()
        .filter(|address| !address.is_empty())
    {
        let _ = write!(text, "\n  with {address},");
    }
    if let Some(file) = diagnostic["range"]["filename"].as_str() {
        let line = diagnostic["range"]["start"]["line"].as_u64().unwrap_or(0);
        let _ = write!(text, "\n  on {file} line {line}");
        if let Some(context) = diagnostic["snippet"]["context"].as_str() {
            let _ = write!(text, ", in {context}");
        }
        text.push(':');
    }
    if let Some(code) = diagnostic["snippet"]["code"].as_str() {
        let first = diagnostic["snippet"]["start_line"].as_u64().unwrap_or(1);
        for (number, line) in (first..).zip(code.lines()) {
            let _ = write!(text, "\n  {number:>4}: {line}");
        }
    }
    for value in diagnostic["snippet"]["values"]
        .as_array()
        .into_iter()
        .flatten()
    {
        if let (Some(name), Some(statement)) =
            (value["traversal"].as_str(), value["statement"].as_str())
        {
            let _ = write!(text, "\n        {name} {statement}");
        }
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }
    if let Some(detail) = diagnostic["detail"]
        .as_str()
        .filter(|detail| !detail.is_empty())
    {
        let _ = write!(text, "\n{detail}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_a_real_state_counts_as_a_state() {
        for state in [
            r#"{"version":4,"serial":1,"lineage":"l","outputs":{},"resources":[]}"#,
            r#"{"version":4,"serial":0,"lineage":"","outputs":{},"resources":[]}"#,
            r#"{"serial":1,"lineage":"l","meta":{},"encrypted_data":"x","encryption_version":"v0"}"#,
        ] {
            assert!(is_state_line(state.as_bytes()), "{state}");
        }
        for other in [
            r#"{"@message":"m","type":"version"}"#,
            r#"{"version":4,"serial":1}"#,
            r#"{"version":4,"serial":1,"lineage":"l""#,
        ] {
            assert!(!is_state_line(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn an_event_is_shown_as_its_message() {
        assert_eq!(
            console_text(&json!({"@message": "Apply complete!", "type": "x"})).unwrap(),
            "Apply complete!"
        );
        assert_eq!(console_text(&json!({"type": "x"})), None);
        assert_eq!(console_text(&json!({"@message": 3})), None);
    }

    #[test]
    fn a_diagnostic_has_its_location_and_its_reason() {
        let event = json!({"@message": "Error: Unsupported argument", "type": "diagnostic", "diagnostic": {
            "severity": "error", "summary": "Unsupported argument", "detail": "No such argument.",
            "address": "terraform_data.x",
            "range": {"filename": "main.tf", "start": {"line": 3}},
            "snippet": {"context": "resource \"terraform_data\" \"x\"", "code": "  foo = var.a", "start_line": 3,
                        "values": [{"traversal": "var.a", "statement": "is \"b\""}]}}});
        assert_eq!(
            console_text(&event).unwrap(),
            "\nError: Unsupported argument\n\n  with terraform_data.x,\n  on main.tf line 3, in resource \
             \"terraform_data\" \"x\":\n     3:   foo = var.a\n        var.a is \"b\"\n\nNo such argument.\n"
        );
    }
}
