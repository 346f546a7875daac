//! Prints measurements and their goals, as a table or as JSON.

use serde_json::{Value, json};

/// One measured number and its goal.
#[derive(Debug)]
pub(crate) struct Measurement {
    pub(crate) name: &'static str,
    pub(crate) value: f64,
    /// `ratio`, `MB`, `s`, `ms`, `lines/s` or `requests/min`.
    pub(crate) unit: &'static str,
    pub(crate) goal: Option<Goal>,
    /// How the number was measured.
    pub(crate) detail: String,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    AtMost(f64),
    AtLeast(f64),
}

impl Measurement {
    /// Whether the goal is met. A number without a goal always meets it.
    pub(crate) fn met(&self) -> bool {
        match self.goal {
            None => true,
            Some(Goal::AtMost(limit)) => self.value <= limit,
            Some(Goal::AtLeast(limit)) => self.value >= limit,
        }
    }

    fn verdict(&self) -> &'static str {
        match self.goal {
            None => "-",
            Some(_) if self.met() => "met",
            Some(_) => "missed",
        }
    }

    fn goal_text(&self) -> String {
        match self.goal {
            None => "-".to_owned(),
            Some(Goal::AtMost(limit)) => format!("<= {limit}"),
            Some(Goal::AtLeast(limit)) => format!(">= {limit}"),
        }
    }
}

pub(crate) fn table(measurements: &[Measurement]) -> String {
    let mut rows = vec![["measurement", "value", "goal", "", "how"].map(str::to_owned)];
    rows.extend(measurements.iter().map(|m| {
        [
            m.name.to_owned(),
            format!("{} {}", number(m.value), m.unit),
            m.goal_text(),
            m.verdict().to_owned(),
            m.detail.clone(),
        ]
    }));
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..4).map(width).collect();
    rows.iter()
        .map(|row| {
            let cells: Vec<_> = row[..4]
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            format!("{}  {}", cells.join("  "), row[4])
                .trim_end()
                .to_owned()
        })
        .collect::<Vec<_>>()
        .join("\n")
}

pub(crate) fn as_json(measurements: &[Measurement]) -> Value {
    measurements
        .iter()
        .map(|m| {
            let (goal, limit) = match m.goal {
                Some(Goal::AtMost(limit)) => ("goal_at_most", limit),
                Some(Goal::AtLeast(limit)) => ("goal_at_least", limit),
                None => {
                    return json!({"name": m.name, "value": m.value, "unit": m.unit, "detail": m.detail});
                }
            };
            json!({
                "name": m.name, "value": m.value, "unit": m.unit, goal: limit, "met": m.met(),
                "detail": m.detail,
            })
        })
        .collect()
}

fn number(value: f64) -> String {
    if value >= 1000.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.2}")
    }
}

pub(crate) fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// The smallest sample that so many percent of the samples do not exceed.
pub(crate) fn percentile(samples: &[f64], percent: usize) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
}

/// The first and the third quartile of the samples.
pub(crate) fn spread(samples: &[f64]) -> String {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = sorted.split_at(sorted.len() / 2);
    // A sample in the middle belongs to both halves.
    let low = &sorted[..high.len().max(low.len())];
    format!("{} to {}", number(median(low)), number(median(high)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_the_middle() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < f64::EPSILON);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn a_percentile_is_a_sample() {
        let samples: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        for (percent, sample) in [(50, 100.0), (99, 198.0), (100, 200.0)] {
            assert!((percentile(&samples, percent) - sample).abs() < f64::EPSILON);
        }
        assert!((percentile(&[7.0], 99) - 7.0).abs() < f64::EPSILON);
        assert!(percentile(&[], 99).is_nan());
    }

    #[test]
    fn goals_are_met_or_missed() {
        let measurement = |value| Measurement {
            name: "plan",
            value,
            unit: "ratio",
            goal: Some(Goal::AtMost(1.1)),
            detail: String::new(),
        };
        assert!(table(&[measurement(1.1)]).contains("met"));
        assert!(table(&[measurement(1.2)]).contains("missed"));
        assert_eq!(as_json(&[measurement(1.2)])[0]["met"], false);
        let at_least = |value| Measurement {
            goal: Some(Goal::AtLeast(0.8)),
            ..measurement(value)
        };
        assert!(at_least(0.8).met() && !at_least(0.7).met());
        assert_eq!(as_json(&[at_least(1.0)])[0]["goal_at_least"], 0.8);
    }

    #[test]
    fn a_spread_is_the_middle_half() {
        assert_eq!(spread(&[4.0, 1.0, 2.0, 3.0]), "1.50 to 3.50");
        assert_eq!(spread(&[5.0, 1.0, 2.0, 3.0, 4.0]), "2.00 to 4.00");
        assert_eq!(spread(&[1.0]), "1.00 to 1.00");
    }
}
