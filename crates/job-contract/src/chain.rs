//! An error and its causes on one line.

use std::error::Error;

/// An error and its causes, outermost first. Libraries repeat their sources in their messages, so repeated texts are left out.
pub fn chain(error: &dyn Error) -> String {
    with_causes(error.to_string(), error.source())
}

/// A text, the cause of what it says, and the causes of that.
pub fn with_causes(mut text: String, mut cause: Option<&(dyn Error + 'static)>) -> String {
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("could not read `x`")]
    struct Outer(#[source] io::Error);

    #[test]
    fn causes_are_listed_outermost_first_and_once() {
        assert_eq!(
            chain(&Outer(io::Error::other("disk full"))),
            "could not read `x`: disk full"
        );
        assert_eq!(
            chain(&Outer(io::Error::other("read `x`"))),
            "could not read `x`"
        );
    }
}
