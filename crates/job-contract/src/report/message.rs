//! The report as a termination message. The kubelet cuts a message that is too long, and half a report cannot be read. So every
//! field has a limit, and the sum of the limits is less than the kubelet's limit.

use super::key::SEAL_BYTES;
use super::{ApplyProgress, FinalReport, ReportKey};

/// The longest termination message that Kubernetes keeps.
pub const MAX_TERMINATION_MESSAGE_BYTES: usize = 4096;

/// The longest valid id: see [`crate::JobData::validate`].
const ID: usize = 128;
/// The longest address of a plan. A longer one does not fit in the platform's records either.
const REFERENCE: usize = 1024;
/// The longest word: a step's type, a version, a commit.
const WORD: usize = 64;
/// The longest phrase: the holder of a lock, or its path.
const PHRASE: usize = 128;
/// The most phases in a report. No step has as many.
const PHASES: usize = 32;
/// The list of packages that the run wanted. The next run names the rest.
const WANTED: usize = 2048;
const ELLIPSIS: char = '\u{2026}';
const ELLIPSIS_BYTES: usize = ELLIPSIS.len_utf8();

/// The limits of longer texts, in bytes of JSON.
#[derive(Clone, Copy)]
struct Budget {
    error: usize,
    hint: usize,
    /// One list of addresses.
    addresses: usize,
    phases: usize,
    wanted: usize,
}

impl Budget {
    /// Each text may fill the message alone, so together they may be too long.
    const AMPLE: Self = Self {
        error: MAX_TERMINATION_MESSAGE_BYTES,
        hint: MAX_TERMINATION_MESSAGE_BYTES,
        addresses: MAX_TERMINATION_MESSAGE_BYTES,
        phases: PHASES,
        wanted: WANTED,
    };
    /// Limits that always fit. The error gets the rest of the message.
    const LEAST: Self = Self {
        error: 0,
        hint: 200,
        addresses: 200,
        phases: 0,
        wanted: 0,
    };
}

impl FinalReport {
    /// The report as a termination message: JSON of at most [`MAX_TERMINATION_MESSAGE_BYTES`] bytes, sealed if there is a
    /// key. What the run wanted comes last. Encodes the report at most four times.
    pub fn to_termination_message(&self, key: Option<&ReportKey>) -> String {
        const LIMIT: usize = MAX_TERMINATION_MESSAGE_BYTES - SEAL_BYTES;
        let mut message = encode(&self.within(Budget::AMPLE));
        if message.len() > LIMIT && !self.wanted.is_empty() {
            let budget = Budget {
                wanted: 0,
                ..Budget::AMPLE
            };
            message = encode(&self.within(budget));
        }
        if message.len() > LIMIT {
            message = encode(&self.within(Budget::LEAST));
            let error = LIMIT.saturating_sub(message.len());
            message = encode(&self.within(Budget {
                error,
                ..Budget::LEAST
            }));
        }
        match key {
            Some(key) => key.seal(&message),
            None => message,
        }
    }

    fn within(&self, budget: Budget) -> Self {
        let mut report = self.clone();
        let author = report.author.as_mut().map(|author| &mut author.run);
        for (id, limit) in [
            (Some(&mut report.job_id), ID),
            (Some(&mut report.step_id), ID),
            (author, PHRASE),
        ] {
            if let Some(id) = id.filter(|id| !fits(id, limit)) {
                id.clear();
            }
        }
        if let Some(step) = &mut report.unreported_step
            && step.plan.take_if(|plan| !fits(plan, REFERENCE)).is_some()
        {
            let text = "the address of the plan is too long for this report and was left out";
            report.error.get_or_insert_with(|| text.to_owned());
        }
        let tool = report.tool.as_mut().map(|tool| &mut tool.version);
        let mut texts = vec![
            (report.step_type.as_mut(), WORD),
            (self.error.as_ref().and(report.error.as_mut()), budget.error),
            (report.hint.as_mut(), budget.hint),
            (tool, WORD),
            (report.commit_id.as_mut(), WORD),
        ];
        if let Some(lock) = &mut report.lock {
            texts.push((Some(&mut lock.id), PHRASE));
            texts.push((Some(&mut lock.who), PHRASE));
            texts.push((Some(&mut lock.operation), WORD));
            texts.push((Some(&mut lock.created), WORD));
            texts.push((Some(&mut lock.path), PHRASE));
        }
        for (text, limit) in texts {
            if let Some(text) = text {
                *text = cut(text, limit);
            }
        }
        if let Some(progress) = &mut report.progress {
            progress.failed = first(&progress.failed, budget.addresses);
            progress.unfinished = first(&progress.unfinished, budget.addresses);
        }
        report.phases.truncate(budget.phases);
        let mut left = budget.wanted;
        let mut takes = |text: &String| {
            let taken = text.chars().map(encoded).sum::<usize>() + r#","""#.len();
            left.checked_sub(taken).is_some_and(|rest| {
                left = rest;
                true
            })
        };
        let fitting = report.wanted.iter().take_while(|text| takes(text)).count();
        report.wanted.truncate(fitting);
        report
    }
}

fn encode(report: &FinalReport) -> String {
    serde_json::to_string(report).expect("a report has no failing serialiser")
}

/// The length of a character in JSON, in bytes.
const fn encoded(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\u{1f}' => 6,
        c => c.len_utf8(),
    }
}

/// The position at which a text must be cut to take at most `budget` bytes in JSON. `None` if all of it fits. Reads only this
/// part of the text.
fn end(text: &str, budget: usize) -> Option<usize> {
    let mut taken = 0;
    text.char_indices()
        .find(|(_, c)| {
            taken += encoded(*c);
            taken > budget
        })
        .map(|(at, _)| at)
}

fn fits(text: &str, budget: usize) -> bool {
    end(text, budget).is_none()
}

/// Cuts a text to `budget` bytes, with an ellipsis at the end.
fn cut(text: &str, budget: usize) -> String {
    if fits(text, budget) {
        return text.to_owned();
    }
    let keep = end(text, budget.saturating_sub(ELLIPSIS_BYTES)).unwrap_or_default();
    format!("{}{ELLIPSIS}", &text[..keep])
}

/// The first items of a list: as many as fit, but at least one.
fn first(list: &[String], budget: usize) -> Vec<String> {
    let mut left = budget;
    let mut kept = Vec::new();
    for text in list.iter().take(ApplyProgress::MAX_ADDRESSES) {
        let text = cut(text, budget);
        let taken = text.chars().map(encoded).sum::<usize>() + r#","""#.len();
        if taken > left && !kept.is_empty() {
            break;
        }
        left = left.saturating_sub(taken);
        kept.push(text);
    }
    kept
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;

    use super::*;
    use crate::final_statuses::Ending;
    use crate::job::Tool;
    use crate::progress::Phase;
    use crate::report::{
        Author, ChangeCounts, LockStatus, PhaseTiming, StateLock, StateStatus, StopReason,
        ToolRecord, UnreportedStep,
    };

    /// Any text, and very long ones: of plain characters, of characters with six bytes in JSON, and of characters with four
    /// bytes.
    fn text() -> impl Strategy<Value = String> {
        let long = |c: &'static str| (0_usize..40_000).prop_map(move |length| c.repeat(length));
        prop_oneof![
            any::<String>(),
            long("a"),
            long("\""),
            long("\u{1}"),
            long("\u{1f980}"),
        ]
    }

    fn lock() -> impl Strategy<Value = StateLock> {
        (text(), text(), text(), text(), text()).prop_map(|(id, who, operation, created, path)| {
            StateLock {
                id,
                who,
                operation,
                created,
                path,
                status: LockStatus::LeftBehind,
            }
        })
    }

    fn progress() -> impl Strategy<Value = ApplyProgress> {
        (vec(text(), 0..30), vec(text(), 0..30)).prop_map(|(failed, unfinished)| ApplyProgress {
            applied: u64::MAX,
            failed,
            unfinished,
            not_begun: Some(u64::MAX),
        })
    }

    /// A report with all fields, and with the longest numbers.
    fn report() -> impl Strategy<Value = FinalReport> {
        let words = (text(), text(), text(), text(), text(), text());
        let rest = (
            option::of(progress()),
            option::of(lock()),
            option::of(option::of(text())),
            (0_usize..100, vec(text(), 0..80)),
        );
        (
            words,
            rest,
            "[0-9]{1,9}",
            "[a-zA-Z0-9._-]{1,128}",
            any::<u8>(),
        )
            .prop_map(
                |(
                    (step_type, error, hint, version, commit, run),
                    (progress, lock, unreported_step, (phases, wanted)),
                    job_id,
                    step_id,
                    outcome,
                )| FinalReport {
                    job_id,
                    step_id,
                    outcome,
                    step_type: Some(step_type),
                    error: Some(error),
                    hint: Some(hint),
                    stopped: Some(StopReason::Cancelled),
                    tool: Some(ToolRecord {
                        name: Tool::Terraform,
                        version,
                    }),
                    commit_id: Some(commit),
                    changes: Some(ChangeCounts {
                        add: u64::MAX,
                        change: u64::MAX,
                        remove: u64::MAX,
                        import: u64::MAX,
                        forget: u64::MAX,
                    }),
                    progress,
                    state: Some(StateStatus::Unknown),
                    lock,
                    phases: vec![
                        PhaseTiming {
                            phase: Phase::BeforeInit,
                            duration_ms: u64::MAX,
                            ok: false,
                        };
                        phases
                    ],
                    wanted,
                    lost_log_lines: u64::MAX,
                    unreported: true,
                    unreported_step: unreported_step.map(|plan| UnreportedStep {
                        ending: Ending::NotReached,
                        after_ok: false,
                        ignore_error: false,
                        plan,
                    }),
                    author: Some(Author {
                        run,
                        exit_code: u8::MAX,
                    }),
                },
            )
    }

    fn key() -> ReportKey {
        ReportKey::parse(&"MDEy".repeat(12)).unwrap()
    }

    fn huge() -> FinalReport {
        let text = || "\u{1}".repeat(9000);
        FinalReport {
            job_id: "-2147483648".into(),
            step_id: "s".repeat(ID),
            outcome: u8::MAX,
            step_type: Some(text()),
            error: Some(text()),
            hint: Some(text()),
            stopped: Some(StopReason::Cancelled),
            tool: Some(ToolRecord {
                name: Tool::Terraform,
                version: text(),
            }),
            commit_id: Some(text()),
            changes: Some(ChangeCounts {
                add: u64::MAX,
                change: u64::MAX,
                remove: u64::MAX,
                import: u64::MAX,
                forget: u64::MAX,
            }),
            progress: Some(ApplyProgress {
                applied: u64::MAX,
                failed: vec![text(); 20],
                unfinished: vec![text(); 20],
                not_begun: Some(u64::MAX),
            }),
            state: Some(StateStatus::Rescued),
            lock: Some(StateLock {
                id: text(),
                who: text(),
                operation: text(),
                created: text(),
                path: text(),
                status: LockStatus::LeftBehind,
            }),
            phases: Vec::new(),
            wanted: vec![text(); 20],
            lost_log_lines: u64::MAX,
            unreported: true,
            unreported_step: Some(UnreportedStep {
                ending: Ending::NotReached,
                after_ok: false,
                ignore_error: false,
                plan: Some("p".repeat(REFERENCE)),
            }),
            author: Some(Author {
                run: "u".repeat(PHRASE),
                exit_code: u8::MAX,
            }),
        }
    }

    #[test]
    fn the_smallest_budgets_together_leave_space_for_a_cause() {
        let least = encode(&huge().within(Budget::LEAST)).len();
        let left = MAX_TERMINATION_MESSAGE_BYTES.checked_sub(least + SEAL_BYTES);
        assert!(
            left > Some(300),
            "{least} of them are taken, {left:?} left for the cause"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_report_fits_and_keeps_whose_it_is_and_how_it_ended(report in report()) {
            let message = report.to_termination_message(Some(&key()));
            prop_assert!(message.len() <= MAX_TERMINATION_MESSAGE_BYTES, "{}", message.len());
            let back = key().open(&message).expect("a report that opens");
            prop_assert_eq!(&back.job_id, &report.job_id);
            prop_assert_eq!(&back.step_id, &report.step_id);
            prop_assert_eq!(back.outcome, report.outcome);
            prop_assert_eq!(back.unreported, report.unreported);
            let plan = |report: &FinalReport| report.unreported_step.clone().and_then(|unreported_step| unreported_step.plan);
            prop_assert!(plan(&back).is_none() || plan(&back) == plan(&report));
            let addresses = |report: &FinalReport| report.progress.clone().map(|done| done.failed.is_empty());
            prop_assert_eq!(addresses(&back), addresses(&report));
        }
    }

    #[test]
    fn forty_packages_that_a_run_wanted_leave_the_report_whole() {
        let of = |number: usize| {
            format!("registry.terraform.io/hashicorp/provider-{number}/5.100.0/linux_amd64")
        };
        let report = FinalReport {
            job_id: "412".into(),
            step_id: "5a5e1f0b-9c3f-4a55-9f0e-3d0f3b8f0101".into(),
            step_type: Some("terraformApply".into()),
            error: Some("e".repeat(900)),
            hint: Some("h".repeat(200)),
            wanted: (0..40).map(of).collect(),
            ..FinalReport::default()
        };
        let message = report.to_termination_message(Some(&key()));
        assert!(message.len() <= MAX_TERMINATION_MESSAGE_BYTES);
        let back = key().open(&message).unwrap();
        assert!(
            (25..40).contains(&back.wanted.len()),
            "{}",
            back.wanted.len()
        );
        assert_eq!(back.wanted, report.wanted[..back.wanted.len()]);
        let without = |report: FinalReport| FinalReport {
            wanted: Vec::new(),
            ..report
        };
        assert_eq!(without(back), without(report.clone()));
        // An error that needs the space of the list gets it.
        let report = FinalReport {
            error: Some("e".repeat(3000)),
            ..report
        };
        let message = report.to_termination_message(Some(&key()));
        let back = key().open(&message).unwrap();
        assert_eq!(back, without(report));
    }

    #[test]
    fn a_plan_whose_address_does_not_fit_is_left_out_with_a_note() {
        let report = FinalReport {
            unreported_step: Some(UnreportedStep {
                ending: Ending::Changes,
                after_ok: true,
                ignore_error: false,
                plan: Some("p".repeat(REFERENCE + 1)),
            }),
            ..FinalReport::default()
        };
        let message = report.to_termination_message(Some(&key()));
        let back = key().open(&message).unwrap();
        assert_eq!(back.unreported_step.unwrap().plan, None);
        assert!(back.error.unwrap().contains("address of the plan"));
    }

    #[test]
    fn cut_texts_are_marked_and_the_cause_gets_the_free_space() {
        let report = FinalReport {
            error: Some("\u{e9}\n".repeat(6000)),
            hint: Some("h".repeat(9000)),
            ..FinalReport::default()
        };
        let message = report.to_termination_message(Some(&key()));
        let room = MAX_TERMINATION_MESSAGE_BYTES - message.len();
        assert!(room < 8, "{room} bytes are left");
        let back = key().open(&message).unwrap();
        assert!(back.error.unwrap().ends_with(ELLIPSIS));
        assert!(back.hint.unwrap().ends_with(ELLIPSIS));
    }

    #[test]
    fn a_short_report_is_kept_whole() {
        let report = FinalReport {
            job_id: "1".into(),
            outcome: 1,
            changes: Some(ChangeCounts {
                add: 1,
                ..ChangeCounts::default()
            }),
            phases: vec![PhaseTiming {
                phase: Phase::Init,
                duration_ms: 1,
                ok: true,
            }],
            ..FinalReport::default()
        };
        let message = report.to_termination_message(None);
        assert_eq!(
            serde_json::from_str::<FinalReport>(&message).unwrap(),
            report
        );
    }
}
