//! The live line at the bottom of a terminal: what runs, and for how long.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

#[derive(Debug)]
pub(super) struct StatusLine {
    bar: Option<ProgressBar>,
    color: bool,
}

impl StatusLine {
    pub(super) const fn new(color: bool) -> Self {
        Self { bar: None, color }
    }

    /// Shows `message` with a clock that starts now.
    pub(super) fn start(&mut self, message: String) {
        let bar = self.bar.get_or_insert_with(|| new_bar(self.color));
        bar.reset_elapsed();
        bar.set_message(message);
    }

    /// Takes the line away.
    pub(super) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Runs `write` while the line is out of the way.
    pub(super) fn around(&self, write: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

fn new_bar(color: bool) -> ProgressBar {
    let template = if color {
        "{spinner:.cyan} {msg:.bold} {elapsed:.dim}"
    } else {
        "{spinner} {msg} {elapsed}"
    };
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
    bar.set_style(ProgressStyle::with_template(template).expect("the template is a constant"));
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}
