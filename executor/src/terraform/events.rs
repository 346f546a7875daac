//! Reads the tool's JSON stream: every event becomes its lines in the run's log and its effect on the
//! structured output (contract 7.6, Appendix B).

use std::fmt::Write as _;

use control_plane::logs::LogWriter;
use serde_json::Value;

use crate::process::Consumer;
use crate::terraform::board::Board;

/// Longest event that is parsed. Larger ones would be held in memory whole; none is known to come near.
const MAX_EVENT_BYTES: usize = 16 * 1024 * 1024;

/// Consumes the stream of one operation.
#[derive(Debug)]
pub struct EventStream {
    log: LogWriter,
    partial: Vec<u8>,
    /// An over-long line is passed on as it comes, up to its end.
    overflowing: bool,
    board: Board,
}

impl EventStream {
    /// Writes to `log`, and keeps account on `board`.
    pub const fn new(log: LogWriter, board: Board) -> Self {
        Self {
            log,
            partial: Vec::new(),
            overflowing: false,
            board,
        }
    }

    /// Ends the stream: an unterminated last line counts too.
    pub async fn finish(mut self) {
        if !self.partial.is_empty() {
            let line = std::mem::take(&mut self.partial);
            let mut text = Vec::new();
            self.line(&line, &mut text);
            self.log.write(&text).await;
        }
        self.log.close().await;
    }

    fn line(&mut self, line: &[u8], text: &mut Vec<u8>) {
        if let Ok(event @ Value::Object(_)) = serde_json::from_slice::<Value>(line) {
            if let Some(console) = console_text(&event) {
                text.extend_from_slice(console.as_bytes());
                text.push(b'\n');
            }
            self.board.event(&event);
        } else {
            self.board.line(line);
            text.extend_from_slice(line);
            text.push(b'\n');
        }
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
                } else if self.partial.len() > MAX_EVENT_BYTES {
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

/// What people read of an event. The message of a diagnostic is only its title; the rest of what the tool
/// would print without `-json` is added.
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
    fn an_event_is_its_message() {
        assert_eq!(
            console_text(&json!({"@message": "Apply complete!", "type": "x"})).unwrap(),
            "Apply complete!"
        );
        assert_eq!(console_text(&json!({"type": "x"})), None);
        assert_eq!(console_text(&json!({"@message": 3})), None);
    }

    #[test]
    fn a_diagnostic_says_where_and_why() {
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
