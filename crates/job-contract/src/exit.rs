//! The executor's exit codes.

use std::fmt;

/// The exit code of an executor process.
///
/// If the launcher repeats failed pods, a reported outcome must not look like a failed pod (contract 11.1). So the code is
/// [`Exit::Done`] for every reported outcome, unless [`crate::env::OUTCOME_EXIT_CODE`] asks for the outcome itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exit {
    /// 0: the step succeeded.
    Done,
    /// 1: the tool or a script failed.
    StepFailed,
    /// 2: a defect of Mayfly.
    Defect,
    /// 64: the executor's own configuration cannot be used.
    BadConfiguration,
    /// 65: the job data is missing, cannot be decoded, or names something that does not exist.
    BadJobData,
    /// 75: infrastructure failed before the step was claimed. It is safe to start the step again.
    Infrastructure,
    /// 76: another executor holds the claim on this step.
    Claimed,
    /// 128 + n: ended because of signal n.
    Signal(u8),
}

impl Exit {
    /// The process exit code.
    pub const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::StepFailed => 1,
            Self::Defect => 2,
            Self::BadConfiguration => 64,
            Self::BadJobData => 65,
            Self::Infrastructure => 75,
            Self::Claimed => 76,
            Self::Signal(signal) => 128_u8.saturating_add(signal),
        }
    }

    /// The meaning of an exit code. `None` for a code that no executor uses.
    pub const fn from_code(code: i32) -> Option<Self> {
        Some(match code {
            0 => Self::Done,
            1 => Self::StepFailed,
            2 => Self::Defect,
            64 => Self::BadConfiguration,
            65 => Self::BadJobData,
            75 => Self::Infrastructure,
            76 => Self::Claimed,
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "1..=64 fits in u8"
            )]
            129..=192 => Self::Signal((code - 128) as u8),
            _ => return None,
        })
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("done"),
            Self::StepFailed => f.write_str("the step failed"),
            Self::Defect => f.write_str("a defect of the executor"),
            Self::BadConfiguration => f.write_str("the executor's configuration is not usable"),
            Self::BadJobData => f.write_str("the job data is not usable"),
            Self::Infrastructure => {
                f.write_str("infrastructure failed before anything was started")
            }
            Self::Claimed => f.write_str("another executor holds this step"),
            Self::Signal(signal) => write!(f, "ended by signal {signal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        let all = [
            Exit::Done,
            Exit::StepFailed,
            Exit::Defect,
            Exit::BadConfiguration,
            Exit::BadJobData,
            Exit::Infrastructure,
            Exit::Claimed,
            Exit::Signal(2),
            Exit::Signal(15),
        ];
        for exit in all {
            assert_eq!(Exit::from_code(i32::from(exit.code())), Some(exit));
        }
        assert_eq!(Exit::from_code(3), None);
    }
}
