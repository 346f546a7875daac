//! Tables for people: columns as wide as what they show, colours where they are wanted. Pure; knows nothing of what
//! the cells mean.

use console::measure_text_width;

use super::paint::Paint;
use super::text::plain;

/// Between two columns.
const GAP: &str = "  ";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Tone {
    #[default]
    Plain,
    Dim,
    Good,
    Warning,
    Bad,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// Text that may come from anywhere: control characters are taken out, lines are joined.
    pub(crate) fn new(text: &str) -> Self {
        Self {
            text: plain(&text.replace(['\n', '\t'], " ")),
            tone: Tone::Plain,
        }
    }

    /// Says that there is nothing to say.
    pub(crate) fn or_dash(text: Option<&str>) -> Self {
        text.filter(|text| !text.is_empty())
            .map_or_else(|| Self::new("-").tone(Tone::Dim), Self::new)
    }

    pub(crate) fn tone(mut self, tone: Tone) -> Self {
        self.tone = tone;
        self
    }

    fn width(&self) -> usize {
        measure_text_width(&self.text)
    }

    fn paint(&self, paint: Paint) -> String {
        match self.tone {
            Tone::Plain => self.text.clone(),
            Tone::Dim => paint.dim(&self.text),
            Tone::Good => paint.green(&self.text),
            Tone::Warning => paint.yellow(&self.text),
            Tone::Bad => paint.red(&self.text),
        }
    }
}

/// Rows of cells under an optional header.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    header: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    pub(crate) fn new(header: &[&'static str]) -> Self {
        Self {
            header: header.to_vec(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// Columns of the longest line.
    pub(crate) fn width(&self) -> usize {
        let widths = self.widths();
        widths.iter().sum::<usize>() + GAP.len() * widths.len().saturating_sub(1)
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        (0..columns.max(self.header.len()))
            .map(|column| {
                let cells = self.rows.iter().filter_map(|row| row.get(column));
                let header = self.header.get(column).map_or(0, |text| text.len());
                cells.map(Cell::width).max().unwrap_or_default().max(header)
            })
            .collect()
    }

    /// The lines of the table, each with its line break.
    pub(crate) fn render(&self, paint: Paint) -> String {
        let widths = self.widths();
        let mut text = String::new();
        if !self.header.is_empty() {
            let cells: Vec<Cell> = self.header.iter().map(|text| Cell::new(text)).collect();
            let line = line(&cells, &widths, Paint { on: false });
            text += &paint.bold(&line);
            text.push('\n');
        }
        for row in &self.rows {
            text += &line(row, &widths, paint);
            text.push('\n');
        }
        text
    }
}

/// Nothing follows the last cell that says something.
fn line(cells: &[Cell], widths: &[usize], paint: Paint) -> String {
    let mut line = String::new();
    let mut owed = 0;
    for (cell, width) in cells.iter().zip(widths) {
        if cell.width() > 0 {
            line.extend(std::iter::repeat_n(' ', owed));
            line += &cell.paint(paint);
            owed = 0;
        }
        owed += width - cell.width() + GAP.len();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        let mut table = Table::new(&["NAME", "STATE"]);
        table.row(vec![
            Cell::new("日本"),
            Cell::new("ok").tone(Tone::Good),
            Cell::new("end"),
        ]);
        table.row(vec![Cell::new("longer one"), Cell::new("")]);
        table.row(vec![Cell::or_dash(None), Cell::new("a\nb\u{1b}[31mc\u{7}")]);
        table
    }

    #[test]
    fn columns_are_as_wide_as_what_is_seen() {
        insta::assert_snapshot!(sample().render(Paint { on: false }), @r"
        NAME        STATE
        日本        ok     end
        longer one
        -           a bc
        ");
        assert_eq!(sample().width(), 10 + 2 + 5 + 2 + 3);
    }

    #[test]
    fn colours_do_not_move_columns() {
        let text = sample().render(Paint { on: true });
        assert!(text.contains("\u{1b}[32mok\u{1b}[0m     end"), "{text:?}");
        assert_eq!(
            console::strip_ansi_codes(&text),
            sample().render(Paint { on: false })
        );
    }
}
