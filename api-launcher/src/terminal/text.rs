//! Texts as people read them.

use super::paint::Paint;

/// A line without colours, cursor movement and carriage returns.
pub(crate) fn plain(line: &str) -> String {
    if line.bytes().any(|byte| byte < b' ' && byte != b'\t') {
        console::strip_ansi_codes(line)
            .chars()
            .filter(|c| *c == '\t' || !c.is_control())
            .collect()
    } else {
        line.to_owned()
    }
}

/// A line of a run's log. With colours, it keeps its own.
pub(crate) fn shown(line: &str, paint: Paint) -> String {
    if !paint.on {
        return plain(line);
    }
    let line = line.trim_end_matches('\r');
    if line.contains('\u{1b}') {
        // A line that leaves its colour on must not colour the ones that follow.
        format!("{line}\u{1b}[0m")
    } else {
        line.to_owned()
    }
}

/// `0.24s`, `12.3s`, `2m 5s`.
pub(crate) fn duration(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0..10 => format!("{seconds}.{:02}s", ms % 1000 / 10),
        10..60 => format!("{seconds}.{}s", ms % 1000 / 100),
        60..3600 => format!("{}m {}s", seconds / 60, seconds % 60),
        _ => format!("{}h {}m", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[test]
    fn plain_lines_hold_no_control_characters() {
        assert_eq!(plain("\u{1b}[32;40;1mok\u{1b}[0m\r"), "ok");
        assert_eq!(plain("a\tb \u{e9}"), "a\tb \u{e9}");
        assert_eq!(plain("\u{1b}]0;title\u{7}x\u{8}"), "x");
    }

    #[rstest]
    #[case(0, "0.00s")]
    #[case(245, "0.24s")]
    #[case(12_345, "12.3s")]
    #[case(125_000, "2m 5s")]
    #[case(7_260_000, "2h 1m")]
    fn durations_are_short(#[case] ms: u64, #[case] expected: &str) {
        assert_eq!(duration(ms), expected);
    }
}
