//! Colours, where they are wanted.

/// Styles, or nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paint {
    pub(crate) on: bool,
}

impl Paint {
    pub(crate) fn bold(self, text: &str) -> String {
        self.style(text, console::Style::bold)
    }

    pub(crate) fn dim(self, text: &str) -> String {
        self.style(text, console::Style::dim)
    }

    pub(crate) fn green(self, text: &str) -> String {
        self.style(text, console::Style::green)
    }

    pub(crate) fn yellow(self, text: &str) -> String {
        self.style(text, console::Style::yellow)
    }

    pub(crate) fn red(self, text: &str) -> String {
        self.style(text, console::Style::red)
    }

    fn style(self, text: &str, style: fn(console::Style) -> console::Style) -> String {
        if self.on {
            style(console::Style::new().force_styling(true))
                .apply_to(text)
                .to_string()
        } else {
            text.to_owned()
        }
    }
}
