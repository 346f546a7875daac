//! What Terraform makes of the lines its provisioners print.
//!
//! Of a line of which nothing comes for a tenth of a second, as on a busy machine, it passes on what it has, as a line
//! of its own and without the blanks at its end.

/// Between the resource and what its provisioner printed, and what ends its colour.
const MARK: &str = "(local-exec):";
const RESET: &str = "\u{1b}[0m";
/// So many lines of others may stand between the pieces of one.
const APART: usize = 8;

/// A log in which lines that Terraform has cut are whole again. `is_whole` knows lines as a provisioner prints them, and
/// none that is cut short; they have no blank, which might be lost. What is not put together to one stays as it is.
pub fn whole(log: &str, is_whole: impl Fn(&str) -> bool) -> String {
    let mut lines: Vec<Option<&str>> = log.split_inclusive('\n').map(Some).collect();
    let mut text = String::with_capacity(log.len());
    for at in 0..lines.len() {
        let Some(line) = lines[at].take() else {
            continue;
        };
        match rest_of(line, &lines[at + 1..], &is_whole) {
            None => text.push_str(line),
            Some((joined, pieces)) => {
                text.push_str(&joined);
                for piece in pieces {
                    lines[at + 1 + piece] = None;
                }
            }
        }
    }
    text
}

fn uncoloured(text: &str) -> &str {
    text.strip_prefix(RESET).unwrap_or(text)
}

/// The whole line that this one begins, and where among those that follow its other pieces are.
fn rest_of(
    line: &str,
    following: &[Option<&str>],
    is_whole: &impl Fn(&str) -> bool,
) -> Option<(String, Vec<usize>)> {
    let rest = &line[line.find(MARK)? + MARK.len()..];
    let printed = uncoloured(uncoloured(rest).strip_prefix(' ')?);
    let from = line.len() - printed.len();
    let whose = &line[..from];
    if is_whole(printed.trim_end()) {
        return None;
    }
    let mut joined = line.trim_end().to_owned();
    let mut pieces = Vec::new();
    for (at, next) in following.iter().enumerate().take(APART) {
        let Some(piece) = next.and_then(|next| next.strip_prefix(whose)) else {
            continue;
        };
        if is_whole(piece.trim_end()) {
            return None;
        }
        joined.push_str(piece.trim_end());
        pieces.push(at);
        if is_whole(&joined[from..]) {
            joined.push('\n');
            return Some((joined, pieces));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole_numbers(log: &str) -> String {
        whole(log, |line| {
            line.starts_with("number-") && line.ends_with('.')
        })
    }

    #[test]
    fn a_line_is_whole_again_wherever_it_was_cut_and_every_other_stays() {
        let log = "a (local-exec): Executing: [\"sh\"]\na (local-exec): number-1.\na (local-exec): number-12.\nend";
        assert_eq!(whole_numbers(log), log);
        for at in 1.."number-12".len() {
            let (one, other) = "number-12.".split_at(at);
            let cut = log.replace("number-12.", &format!("{one}\na (local-exec): {other}"));
            assert_eq!(whole_numbers(&cut), log, "{cut}");
            let apart = log.replace(
                "number-12.",
                &format!("{one}\na: Still creating... [10s elapsed]\na (local-exec): {other}"),
            );
            assert!(
                whole_numbers(&apart).contains("a (local-exec): number-12.\n"),
                "{apart}"
            );
            let coloured = |log: &str| {
                let prefix = "\u{1b}[0m\u{1b}[1ma (local-exec):\u{1b}[0m \u{1b}[0m";
                log.replace("a (local-exec): ", prefix)
            };
            assert_eq!(whole_numbers(&coloured(&cut)), coloured(log), "{cut}");
        }
    }

    #[test]
    fn what_is_not_there_is_not_made_up() {
        for log in [
            // A byte is lost, the other piece is of another line, and the next line is one.
            "a (local-exec): numb\na (local-exec): r-1.\n",
            "a (local-exec): numb\nb (local-exec): er-1.\n",
            "a (local-exec): number-\na (local-exec): number-2.\na (local-exec): 1.\n",
            "numb\ner-1.\n",
        ] {
            assert_eq!(whole_numbers(log), log);
        }
    }
}
