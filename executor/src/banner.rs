//! The lines Mayfly itself writes into a run's log, in Terrakube's conventions (contract 7.6).

use job_contract::{Command, JobData, Tool};

const SEPARATOR: &str = "***************************************";

/// Colours of banners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Palette {
    /// Whether the tool's own output is coloured.
    pub color: bool,
}

impl Palette {
    fn highlight(self, text: &str) -> String {
        if self.color {
            format!("\u{1b}[32;40;1m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        }
    }

    /// A failure, in red.
    pub fn failure(self, text: &str) -> String {
        if self.color {
            format!("\u{1b}[31;40;1m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        }
    }

    /// Before init.
    pub fn init(self, job: &JobData) -> String {
        let tool = job.tool().banner();
        self.lines(&[
            SEPARATOR,
            &format!(
                "Initializing Terrakube Job {} Step {}",
                job.job_id, job.step_id
            ),
            &format!("Running {tool} {}", job.terraform_version),
            "",
            "",
            SEPARATOR,
            &format!("Running {tool} Init: "),
        ])
    }

    /// Before plan, apply or destroy.
    pub fn operation(self, tool: Tool, name: &str) -> String {
        self.lines(&[
            SEPARATOR,
            &format!("Running {} {name}", tool.banner()),
            SEPARATOR,
        ])
    }

    /// Before a verbose script.
    pub fn script_begins(self, command: &Command, runtime: &str) -> String {
        let head = self.lines(&[
            SEPARATOR,
            &format!("Command Priority {}", command.priority),
            &format!("Running {runtime}"),
            "Script Information:  ",
        ]);
        let begin = self.lines(&[SEPARATOR, "Begin Execution: "]);
        format!(
            "{head}{}\n\n\n\n{begin}",
            command.script.trim_end_matches('\n')
        )
    }

    /// After a verbose script.
    pub fn script_ends(self) -> String {
        format!("{}\n\n", self.lines(&["End Execution... "]))
    }

    fn lines(self, lines: &[&str]) -> String {
        let paint = |line: &&str| {
            if line.is_empty() {
                String::from("\n")
            } else {
                self.highlight(line) + "\n"
            }
        };
        lines.iter().map(paint).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banners_hold_the_lines_of_the_contract() {
        let job = JobData {
            job_id: "7".into(),
            step_id: "s".into(),
            terraform_version: "~> 1.9".into(),
            ..JobData::default()
        };
        let plain = Palette { color: false };
        assert_eq!(
            plain.init(&job),
            format!(
                "{SEPARATOR}\nInitializing Terrakube Job 7 Step s\nRunning Terraform ~> 1.9\n\n\n{SEPARATOR}\nRunning Terraform Init: \n"
            )
        );
        assert_eq!(
            Palette { color: true }
                .operation(Tool::OpenTofu, "PLAN")
                .lines()
                .nth(1),
            Some("\u{1b}[32;40;1mRunning Tofu PLAN\u{1b}[0m")
        );
    }
}
