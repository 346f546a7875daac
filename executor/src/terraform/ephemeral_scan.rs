//! Finds ephemeral variables in a configuration file that the parser of this crate cannot read. The tool accepts more, for
//! example an object with the same key twice.

use super::hcl::is_identifier;

/// The names of the variables in `text` that are ephemeral.
pub(super) fn ephemeral_variables(text: &str) -> impl Iterator<Item = &str> {
    let mut variable = None;
    text.lines().filter_map(move |line| {
        if let Some(name) = name_of_variable(line.trim_start()) {
            variable = Some(name);
        } else if begins_block(line) {
            variable = None;
        }
        variable.filter(|_| sets_ephemeral(line))
    })
}

/// Whether a line begins a block of the file, and is no attribute.
fn begins_block(line: &str) -> bool {
    let rest =
        line.trim_start_matches(|letter: char| letter.is_alphanumeric() || "_-".contains(letter));
    line.starts_with(char::is_alphabetic) && !rest.trim_start().starts_with('=')
}

/// The name in the first line of a `variable` block.
fn name_of_variable(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("variable")?;
    let name = rest.split('{').next()?.trim();
    let is_label = rest.starts_with(['"', ' ', '\t']);
    let name = name.trim_matches('"');
    (is_label && is_identifier(name)).then_some(name)
}

/// Whether a line has the attribute that makes a variable ephemeral.
fn sets_ephemeral(line: &str) -> bool {
    let attribute = line.rsplit('{').next().unwrap_or(line);
    let Some((name, value)) = attribute.split_once('=') else {
        return false;
    };
    // The tool converts texts.
    let value = value.trim_start().trim_start_matches('"');
    name.trim() == "ephemeral" && value.starts_with("true")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_variables_with_the_attribute_are_found() {
        let text = r#"
locals {
  twice    = { a = 1, a = 2 }
  variable = "x"
}
variable "size" {
  type = number
}
  variable "token" {
    type      = string
    ephemeral = true
  }
variable short { ephemeral = true }
variable "text"{
  ephemeral = "true"
}
variable "not" {
  # ephemeral = true
  ephemeral = false
}
output "o" {
  ephemeral = true
}
"#;
        let found: Vec<_> = ephemeral_variables(text).collect();
        assert_eq!(found, ["token", "short", "text"]);
    }
}
