//! What shells make of a text with backslashes, which they take for escapes when they print it. Pure.

use std::borrow::Cow;

use super::numerals::{digits, number};

/// Who prints, as far as it makes a difference.
#[derive(Clone, Copy)]
pub(super) struct Shell {
    /// Takes `\101` for `A`, as it takes `\0101`.
    plain_octal: bool,
    /// Takes `\x41` and `\u0041` for `A`, and `\E` for an escape.
    hexadecimal: bool,
}

pub(super) const SHELLS: [Shell; 3] = [
    // `echo` of dash, which is `sh` on Debian and what `local-exec` runs.
    Shell {
        plain_octal: true,
        hexadecimal: false,
    },
    // `echo -e` of bash.
    Shell {
        plain_octal: false,
        hexadecimal: true,
    },
    // `printf %b` of bash; `echo -e` of BusyBox.
    Shell {
        plain_octal: true,
        hexadecimal: true,
    },
];

impl Shell {
    /// What is printed, with a replacement character for bytes that are no UTF-8. The same text if there is nothing to
    /// carry out.
    pub(super) fn prints(self, text: &str) -> Cow<'_, str> {
        let Some(first) = text.find('\\') else {
            return Cow::Borrowed(text);
        };
        let mut printed = text.as_bytes()[..first].to_vec();
        let mut rest = &text.as_bytes()[first..];
        while let Some((&byte, after)) = rest.split_first() {
            rest = match (byte, after.split_first()) {
                (b'\\', Some((b'c', _))) => break,
                (b'\\', Some((&letter, behind))) => {
                    if let Some(behind) = self.escape(letter, behind, &mut printed) {
                        behind
                    } else {
                        printed.extend([byte, letter]);
                        behind
                    }
                }
                _ => {
                    printed.push(byte);
                    after
                }
            };
        }
        let printed = String::from_utf8_lossy(&printed).into_owned();
        if printed == text {
            Cow::Borrowed(text)
        } else {
            Cow::Owned(printed)
        }
    }

    /// Carries out one escape, and returns what stands behind it; `None` if it is none.
    fn escape<'t>(self, letter: u8, behind: &'t [u8], printed: &mut Vec<u8>) -> Option<&'t [u8]> {
        let plain = match letter {
            b'a' => 7,
            b'b' => 8,
            b'e' => 27,
            b'E' if self.hexadecimal => 27,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'v' => 11,
            b'\\' => b'\\',
            b'0' => {
                let (number, behind) = up_to(behind, 8, 3).unwrap_or((0, behind));
                printed.push(number.to_le_bytes()[0]);
                return Some(behind);
            }
            b'1'..=b'7' if self.plain_octal => {
                let first = u32::from(letter - b'0');
                let (number, behind) = match up_to(behind, 8, 2) {
                    Some((more, left)) => {
                        let digits = behind.len() - left.len();
                        (first << (3 * digits) | more, left)
                    }
                    None => (first, behind),
                };
                printed.push(number.to_le_bytes()[0]);
                return Some(behind);
            }
            b'x' if self.hexadecimal => {
                let (number, behind) = up_to(behind, 16, 2)?;
                printed.push(number.to_le_bytes()[0]);
                return Some(behind);
            }
            b'u' | b'U' if self.hexadecimal => {
                let most = if letter == b'u' { 4 } else { 8 };
                let (number, behind) = up_to(behind, 16, most)?;
                let c = char::from_u32(number).unwrap_or(char::REPLACEMENT_CHARACTER);
                printed.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                return Some(behind);
            }
            _ => return None,
        };
        printed.push(plain);
        Some(behind)
    }
}

/// A number of at most so many digits, and what stands behind it; `None` if there is no digit.
fn up_to(text: &[u8], radix: u32, most: usize) -> Option<(u32, &[u8])> {
    let value = number(text, radix, 1, most)?;
    Some((value, &text[digits(text, radix, most)..]))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::Redactor;
    use super::*;

    /// Everything that can stand behind a backslash, and numbers of every length.
    fn escapes() -> Vec<String> {
        let numbers = [
            "0",
            "04",
            "041",
            "0101",
            "01012",
            "0377",
            "2",
            "23",
            "234",
            "2345",
            "377",
            "400",
            "x",
            "x4",
            "x41",
            "x414",
            "xe9",
            "u",
            "u4",
            "u41",
            "u0041",
            "u00e9",
            "u20ac5",
            "U41",
            "U00000041",
            "U0001f600",
            "n\\t",
            "\\\\n",
            "e[31m",
            "r\\n",
        ];
        let letters = ('!'..='~').map(|letter| letter.to_string());
        letters
            .chain(numbers.into_iter().map(str::to_owned))
            .collect()
    }

    fn printed(shell: &str, script: &str, text: &str) -> Vec<u8> {
        let mut command = Command::new(shell);
        command.args(["-c", script]).env("SHOWN", text);
        command.env("LC_ALL", "C.UTF-8").output().unwrap().stdout
    }

    const PRINTERS: [(&str, &str); 3] = [
        ("sh", "echo \"$SHOWN\""),
        ("bash", "echo -e \"$SHOWN\""),
        ("bash", "printf '%b\\n' \"$SHOWN\""),
    ];

    #[test]
    fn escapes_are_carried_out_as_the_shells_do() {
        for (shell, (program, script)) in SHELLS.into_iter().zip(PRINTERS) {
            // Elsewhere `sh` is another shell, which may print what it is given.
            let is_dash = printed(program, script, r"\101") == b"A\n";
            if program == "sh" && !is_dash {
                continue;
            }
            for escape in escapes() {
                let text = format!("correct-horse\\{escape}battery-staple");
                let bytes = printed(program, script, &text);
                let expected = String::from_utf8_lossy(&bytes);
                let expected = expected.strip_suffix('\n').unwrap_or(&expected);
                assert_eq!(shell.prints(&text), expected, "{script}: {text}");
            }
        }
    }

    #[test]
    fn what_shells_make_of_a_secret_is_masked() {
        for escape in escapes() {
            let secret = format!("correct-horse\\{escape}battery-staple");
            let redactor = Redactor::new([&secret]);
            for (program, script) in PRINTERS {
                let bytes = printed(program, script, &secret);
                let text = String::from_utf8_lossy(&bytes);
                // As a log shows it, and tools that end a line where a cursor goes back.
                let coloured = text.replace('\u{1b}', "");
                for line in text.split(['\n', '\r']).chain(coloured.lines()) {
                    let masked = redactor.redact(line);
                    assert!(!masked.contains("horse"), "{script}, {escape}: {masked}");
                    assert!(!masked.contains("battery-"), "{script}, {escape}: {masked}");
                }
            }
        }
    }

    #[test]
    fn a_text_without_escapes_is_printed_as_it_is() {
        for shell in SHELLS {
            for text in ["", "plain", "\\", "ends with \\", "\\q", "ü\\ä"] {
                assert!(matches!(shell.prints(text), Cow::Borrowed(same) if same == text));
            }
        }
    }
}
