//! Draws the timeline of a run: one line for each moment, with a bar for its duration. Pure.

use std::ops::Range;

use cluster::explain::TimelineEntry;
use k8s_openapi::jiff::Timestamp;

use crate::terminal::paint::Paint;
use crate::terminal::table::{Cell, Table, Tone};
use crate::terminal::text::duration;

/// Columns of the longest bar.
const COLUMNS: i64 = 32;

/// Returns the lines of the timeline. Empty if nothing is known.
pub(super) fn draw(timeline: &[TimelineEntry], paint: Paint) -> String {
    let Some(first) = timeline.first() else {
        return String::new();
    };
    let stretches: Vec<Range<i64>> = timeline
        .iter()
        .map(|moment| stretch(moment, first.at))
        .collect();
    let whole = stretches.iter().map(|s| s.end).max().unwrap_or_default();
    let mut table = Table::default();
    for (index, (moment, stretch)) in timeline.iter().zip(&stretches).enumerate() {
        let tone = match (moment.failed, moment.is_phase) {
            (true, _) => Tone::Bad,
            (false, true) => Tone::Good,
            (false, false) => Tone::Dim,
        };
        let (indent, took) = if moment.is_phase {
            ("  ", duration_of(moment))
        } else if index == 0 {
            ("", String::new())
        } else {
            ("", format!("+{}", duration_of(moment)))
        };
        let bar = if index == 0 {
            String::new()
        } else {
            bar(stretch, whole, moment.is_phase)
        };
        let mark = if moment.failed { " \u{2717}" } else { "" };
        table.row(vec![
            Cell::new(&moment.at.strftime("%H:%M:%S").to_string()).tone(Tone::Dim),
            Cell::new(&format!("{indent}{}{mark}", moment.what)),
            Cell::new(&took),
            Cell::new(&bar).tone(tone),
            Cell::new(moment.detail.as_deref().unwrap_or_default()).tone(Tone::Dim),
        ]);
    }
    table.render(paint)
}

fn duration_of(moment: &TimelineEntry) -> String {
    duration(u64::try_from(moment.milliseconds).unwrap_or_default())
}

/// Returns a span of time, in milliseconds since the beginning. A phase lasts from its beginning. A moment ends the wait
/// before it.
fn stretch(moment: &TimelineEntry, start: Timestamp) -> Range<i64> {
    let at = i64::try_from(moment.at.duration_since(start).as_millis())
        .unwrap_or(i64::MAX)
        .max(0);
    let long = moment.milliseconds.max(0);
    if moment.is_phase {
        at..at.saturating_add(long)
    } else {
        at.saturating_sub(long).max(0)..at
    }
}

/// A duration that is shorter than a column gets a thin bar.
fn bar(stretch: &Range<i64>, whole: i64, is_phase: bool) -> String {
    let scale = |at: i64| {
        let column = i128::from(at) * i128::from(COLUMNS) / i128::from(whole.max(1));
        usize::try_from(column).unwrap_or_default()
    };
    let (from, to) = (scale(stretch.start), scale(stretch.end));
    let offset = from.min(scale(whole).saturating_sub(1));
    let bar = match (to - from, is_phase) {
        (0, _) => "\u{258f}".to_owned(),
        (columns, true) => "\u{2588}".repeat(columns),
        (columns, false) => "\u{2591}".repeat(columns),
    };
    " ".repeat(offset) + &bar
}

#[cfg(test)]
pub(super) use tests::timeline;

#[cfg(test)]
mod tests {
    use super::super::list::at;
    use super::*;

    fn moment(what: &str, second: i64, milliseconds: i64) -> TimelineEntry {
        TimelineEntry {
            what: what.into(),
            at: at(second),
            milliseconds,
            is_phase: false,
            failed: false,
            detail: None,
        }
    }

    pub(in crate::kubernetes::commands) fn timeline() -> Vec<TimelineEntry> {
        let phase = |what, second, milliseconds, failed| TimelineEntry {
            is_phase: true,
            failed,
            ..moment(what, second, milliseconds)
        };
        vec![
            moment("accepted", 0, 0),
            moment("released", 0, 0),
            TimelineEntry {
                detail: Some("on node-1".into()),
                ..moment("scheduled", 2, 2000)
            },
            moment("image pulled", 10, 8000),
            moment("started", 11, 1000),
            phase("workspace", 11, 310, false),
            phase("init", 12, 9000, false),
            phase("plan", 21, 18_500, true),
            TimelineEntry {
                detail: Some("exit code 1".into()),
                ..moment("ended", 40, 29_000)
            },
            moment("reported", 41, 1000),
        ]
    }

    #[test]
    fn a_timeline_shows_the_duration_of_each_part() {
        insta::assert_snapshot!(draw(&timeline(), Paint { on: false }));
    }

    #[test]
    fn a_run_that_was_only_accepted_has_a_line_and_no_bar() {
        let text = draw(&[moment("accepted", 0, 0)], Paint { on: false });
        assert_eq!(text, "00:00:00  accepted\n");
        assert_eq!(draw(&[], Paint { on: false }), "");
    }

    #[test]
    fn clocks_that_differ_give_no_negative_bars() {
        let odd = [
            moment("accepted", 10, 0),
            moment("released", 3, 0),
            moment("started", 12, 99_000),
        ];
        let text = draw(&odd, Paint { on: false });
        assert_eq!(text.lines().count(), 3, "{text}");
    }
}
