//! What a build without the feature `full` says of what it leaves out. With it, a crate has the clients and codecs that a folder on
//! one machine does not need.

/// What to do, as a hint.
pub const BUILD_FULLY: &str = "build without `--no-default-features`";

/// The end of a sentence that begins with the name of a setting. `what` is what the setting needs.
#[must_use]
pub fn needs(what: &str) -> String {
    format!("needs {what}, which this build leaves out: {BUILD_FULLY}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_is_left_out_and_what_to_do() {
        assert_eq!(
            needs("a client of Redis"),
            "needs a client of Redis, which this build leaves out: build without `--no-default-features`"
        );
    }
}
