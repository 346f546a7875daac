//! What real programs make of a secret when they show it, whatever stands in it: every character, before and behind
//! every special one. None of it comes out. What is no part of a development machine is used where it is there.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::super::lines::LineBuffer;
use super::*;

/// What stands around the characters in question, so that it is found whatever becomes of these.
const LEFT: &str = "vTzKqRw";
const RIGHT: &str = "mXpLdYs";
/// So much of it tells something.
const TELLING: usize = 5;
/// Behind a sign that begins an escape they mean something somewhere.
const LETTERS: &str = "abcdefnrstuvxABCDEFLNPUX01234567_";
/// So many characters meet another in one secret.
const PAIRS: usize = 40;
/// So many places are named where something came out.
const MOST_NAMED: usize = 60;

/// What encodings and quotes of all kinds leave alone.
fn is_ordinary(c: char) -> bool {
    c.is_ascii_alphanumeric()
}

/// Every character that can be typed, and of the others some of each kind.
fn characters() -> Vec<char> {
    let others = "\t\u{1b}\u{7f}\u{85}\u{a0}\u{ad}\u{e9}\u{df}\u{301}\u{416}\u{20ac}\u{200b}\u{2028}\u{feff}\u{fffd}\u{1f600}";
    (' '..='~').chain(others.chars()).collect()
}

/// Secrets with this between two words.
fn between(middles: impl IntoIterator<Item = String>) -> Vec<String> {
    let middles = middles.into_iter();
    middles
        .map(|middle| format!("{LEFT}{middle}{RIGHT}"))
        .collect()
}

/// Each character alone, at either end, and beside what changes how a text is quoted.
fn every_character() -> Vec<String> {
    let quoting = [
        "", "'", "\"", "'\"", "'\"\\", "'\"`", "\t'", "\u{e9}\"", "'\n\"\\",
    ];
    let mut all = Vec::new();
    for c in characters() {
        let beside = if is_ordinary(c) {
            &quoting[..1]
        } else {
            &quoting
        };
        all.extend(between(beside.iter().map(|beside| format!("{beside}{c}"))));
        all.push(format!("{c}{LEFT}{RIGHT}"));
        all.push(format!("{LEFT}{RIGHT}{c}"));
    }
    let known = [
        "${",
        "${a}",
        "%{",
        "%{ if a }",
        "$(",
        "$$",
        "%%",
        "\\n",
        "\\\\n",
        "\\t\\",
        "\\x41",
        "\\101",
        "\\2",
        "\\u0041",
        "%41",
        "%2",
        "%25",
        "%%41",
        "%s",
        "&amp;",
        "&#65;",
        "&lt",
        "#{",
        "#{a}",
        "{{",
        "{{a}}",
        "!!",
        "!",
        "<<EOT",
        "''",
        "'''",
        "\"\"",
        "'\"'\"'",
        "'\\''",
        "$'",
        "\\'",
        "\\\"",
        "\n\n",
        "\n  \n  ",
        "  ",
        "\t\t",
        "--",
        "://",
        "://u:p@",
        "*/",
        "/*",
        "//",
        "-- ",
        "; ",
        "=\"",
        "u0026",
        "\u{e9}\u{20ac}'\"\\\u{1f600}",
    ];
    all.extend(between(known.map(str::to_owned)));
    all
}

/// Every special character before and behind every character, a few in one secret.
fn every_pair() -> Vec<String> {
    let mut all = Vec::new();
    for special in characters().into_iter().filter(char::is_ascii) {
        if is_ordinary(special) {
            continue;
        }
        let is_of_interest =
            |c: &char| !is_ordinary(*c) || ("\\%&".contains(special) && LETTERS.contains(*c));
        let others: Vec<_> = characters().into_iter().filter(is_of_interest).collect();
        for some in others.chunks(PAIRS) {
            let pairs = some.iter().map(|c| {
                let before = if c.is_ascii() {
                    String::new()
                } else {
                    format!("{c}{special}G")
                };
                format!("{special}{c}Z{before}")
            });
            all.extend(between([pairs.collect()]));
        }
    }
    all
}

/// What programs showed, by their names and the values.
#[derive(Default)]
struct Shown(BTreeMap<String, BTreeMap<usize, Vec<u8>>>);

impl Shown {
    /// Reads records of a name, the number of a value, and what was shown; without a number, of all variables `V…`.
    fn read(&mut self, program: &str, output: &[u8], count: usize) {
        for record in output.split(|byte| *byte == 0x1e) {
            let mut fields = record.splitn(3, |byte| *byte == 0x1f);
            let (Some(name), Some(number), Some(shown)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let (name, number) = (
                String::from_utf8_lossy(name),
                String::from_utf8_lossy(number),
            );
            let name = name.rsplit('\n').next().unwrap_or_default();
            let of_name = self.0.entry(format!("{program}, {name}")).or_default();
            if let Ok(number) = number.parse() {
                of_name.insert(number, shown.to_owned());
                continue;
            }
            // Of each variable as much as begins with its name.
            let is_start = |at: &usize| shown[*at..].starts_with(b"V");
            let starts = (0..shown.len()).filter(is_start).filter_map(|at| {
                let rest = &shown[at + 1..];
                let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
                let number = std::str::from_utf8(&rest[..digits]).unwrap().parse().ok()?;
                (rest.get(digits) == Some(&b'=') && number < count).then_some((at, number))
            });
            let starts: Vec<(usize, usize)> = starts.collect();
            let ends = starts
                .iter()
                .skip(1)
                .map(|(start, _)| *start)
                .chain([shown.len()]);
            for ((start, number), end) in starts.iter().zip(ends) {
                of_name.insert(*number, shown[*start..end].to_owned());
            }
        }
    }

    /// Nothing of the values is left once they are masked, and each was shown by everyone.
    fn tells_nothing(&self, values: &[String]) {
        let mut told = String::new();
        let mut times = BTreeMap::<&str, usize>::new();
        for (number, value) in values.iter().enumerate() {
            let redactor = Redactor::new([value]);
            for (printer, shown) in &self.0 {
                let Some(shown) = shown.get(&number) else {
                    panic!("{printer} did not show {value:?}");
                };
                let masked = masked(&redactor, shown);
                let encoded = printer.contains('!')
                    && value.trim() == value
                    && value.len() < 128
                    && masked.len() > 2 * MASK.len();
                if encoded || tells(&masked) {
                    let times = times.entry(printer).or_default();
                    *times += 1;
                    if *times <= MOST_NAMED / 20 {
                        let _ = writeln!(told, "{printer}: {value:?} as {masked:?}");
                    }
                }
            }
        }
        assert!(told.is_empty(), "{times:#?}\n{told}");
    }
}

/// What comes out of a log.
fn masked(redactor: &Redactor, shown: &[u8]) -> String {
    let (mut lines, mut masked) = (LineBuffer::new(1024 * 1024), Vec::new());
    lines.push(shown, redactor, &mut masked);
    lines.close(redactor, &mut masked);
    String::from_utf8(masked).unwrap()
}

fn tells(masked: &str) -> bool {
    let words = [LEFT, RIGHT];
    words
        .into_iter()
        .any(|word| parts(word, TELLING).any(|part| masked.contains(part)))
}

fn parts(text: &str, length: usize) -> impl Iterator<Item = &str> {
    (0..=text.len() - length).map(move |start| &text[start..start + length])
}

/// What a program writes; nothing if there is none of that name.
fn output(program: &str, args: &[&str], configure: impl FnOnce(&mut Process)) -> Option<Vec<u8>> {
    let mut process = Process::new(program);
    process
        .args(args)
        .env("LC_ALL", "C.UTF-8")
        .stderr(Stdio::inherit());
    configure(&mut process);
    match process.output() {
        Ok(output) => {
            assert!(output.status.success(), "{program}");
            Some(output.stdout)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => panic!("{program}: {error}"),
    }
}

fn file(folder: &TempDir, name: &str, content: &str) -> String {
    let path = folder.path().join(name);
    fs::write(&path, content).unwrap();
    path.to_str().unwrap().to_owned()
}

fn all_values(folder: &TempDir, values: &[String]) -> String {
    let all: String = values.iter().flat_map(|value| [value, "\0"]).collect();
    file(folder, "values", &all)
}

fn trace(folder: &TempDir) -> Vec<u8> {
    fs::read(folder.path().join("trace")).unwrap()
}

fn shells(values: &[String], shown: &mut Shown) {
    let folder = tempfile::tempdir().unwrap();
    let input = all_values(&folder, values);
    let script = file(&folder, "bash.sh", include_str!("printers/bash.sh"));
    let at = folder.path().to_str().unwrap();
    for locale in ["C.UTF-8", "C"] {
        let args = [script.as_str(), &input, at];
        let out = output("bash", &args, |bash| {
            bash.env_clear()
                .env("PATH", "/usr/bin:/bin")
                .env("LC_ALL", locale);
        });
        let name = format!("bash in {locale}");
        shown.read(&name, &out.expect("bash"), values.len());
        shown.read(&name, &trace(&folder), values.len());
    }
    let script = file(&folder, "sh.sh", include_str!("printers/sh.sh"));
    let args = [script.as_str(), &values.len().to_string(), at];
    let out = output("sh", &args, |sh| {
        sh.env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("LC_ALL", "C.UTF-8");
        sh.envs(
            values
                .iter()
                .enumerate()
                .map(|(number, value)| (format!("V{number}"), value)),
        );
    });
    shown.read("sh", &out.expect("sh"), values.len());
    shown.read("sh", &trace(&folder), values.len());
}

fn languages(values: &[String], shown: &mut Shown) {
    let folder = tempfile::tempdir().unwrap();
    let input = all_values(&folder, values);
    for (program, name, script) in [
        ("python3", "python.py", include_str!("printers/python.py")),
        ("node", "node.js", include_str!("printers/node.js")),
        ("perl", "perl.pl", include_str!("printers/perl.pl")),
    ] {
        let script = file(&folder, name, script);
        let out = output(program, &[&script, &input], |_| {});
        // The other tests need it too.
        assert!(out.is_some() || program != "python3", "no python3");
        if let Some(out) = out {
            shown.read(program, &out, values.len());
        }
    }
    let script = file(&folder, "jq.jq", include_str!("printers/jq.jq"));
    let input = file(
        &folder,
        "values.json",
        &serde_json::to_string(values).unwrap(),
    );
    if let Some(out) = output("jq", &["-jf", &script, &input], |_| {}) {
        shown.read("jq", &out, values.len());
    }
}

/// What Terraform plans, applies and refuses, for people and for programs.
fn terraform(values: &[String]) -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    file(&folder, "main.tf", include_str!("printers/main.tf"));
    let variables = serde_json::json!({ "values": values }).to_string();
    file(&folder, "all.auto.tfvars.json", &variables);
    let mut shown = Vec::new();
    for args in [
        "plan -no-color",
        "apply -auto-approve",
        "output -json",
        "show -json",
        "plan -no-color -var=refused=true",
        "plan -json -var=refused=true",
    ] {
        let mut process = Process::new("terraform");
        process.env_remove("TF_CLI_CONFIG_FILE");
        process.args(args.split(' ')).current_dir(folder.path());
        let output = process.output().unwrap();
        let is_refused = args.ends_with("true");
        assert_eq!(output.status.success(), !is_refused, "{output:?}");
        shown.push((args.to_owned(), [output.stdout, output.stderr].concat()));
    }
    shown
}

fn show(values: &[String]) -> Shown {
    let mut shown = Shown::default();
    shells(values, &mut shown);
    languages(values, &mut shown);
    shown
}

#[test]
fn what_programs_show_of_a_secret_is_masked_whatever_character_is_in_it() {
    let values = every_character();
    show(&values).tells_nothing(&values);
}

#[test]
fn what_programs_show_of_a_secret_is_masked_whatever_characters_meet_in_it() {
    let values = every_pair();
    let mut shown = show(&values);
    // What is escaped again consists of the same characters whatever it was.
    let again = [" in C,", "twice", "times", " of "];
    shown
        .0
        .retain(|printer, _| again.iter().all(|part| !printer.contains(part)));
    shown.tells_nothing(&values);
}

/// Phrases of words that tell something, and one that does not.
fn phrases() -> Vec<String> {
    let phrase = |words: usize| {
        let words = (0..words).map(|word| match word % 3 {
            0 => format!("{}{word}", &LEFT[..2 + word % 5]),
            1 => "in".to_owned(),
            _ => format!("{}.{}", &RIGHT[..5], "q".repeat(word)),
        });
        words.collect::<Vec<_>>().join(" ")
    };
    (2..14).map(phrase).collect()
}

/// Folds paragraphs, each of which begins a little later than the one before, as wide as terminals are and as narrow.
fn folders(paragraphs: &str) -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    let input = file(&folder, "paragraphs", paragraphs);
    let python = "import sys, textwrap\nfor paragraph in open(sys.argv[1], encoding='utf-8'):\n print(textwrap.fill(paragraph, int(sys.argv[2]), initial_indent='  ', subsequent_indent='> | '))\n";
    let mut shown = Vec::new();
    for width in ["40", "60", "78"] {
        for (program, args) in [
            ("fold", vec!["-s", "-w", width, &input]),
            ("fmt", vec!["-w", width, &input]),
            ("python3", vec!["-c", python, &input, width]),
        ] {
            let out = output(program, &args, |_| {}).expect(program);
            shown.push((format!("{program}, {width}"), out));
        }
    }
    shown
}

/// What Terraform has to say about values it refuses, with and without colours.
fn refusals(values: &[String]) -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    file(&folder, "main.tf", include_str!("printers/refusal.tf"));
    let variables = serde_json::json!({ "values": values }).to_string();
    file(&folder, "all.auto.tfvars.json", &variables);
    let colours = ["plan", "plan -no-color"].into_iter().map(|args| {
        let mut process = Process::new("terraform");
        process.env_remove("TF_CLI_CONFIG_FILE");
        process.args(args.split(' ')).current_dir(folder.path());
        let output = process.output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        (
            format!("terraform {args}"),
            [output.stdout, output.stderr].concat(),
        )
    });
    colours.collect()
}

#[test]
fn phrases_are_masked_wherever_they_are_folded() {
    let phrases = phrases();
    let redactor = Redactor::new(&phrases);
    let paragraphs = phrases.iter().flat_map(|phrase| {
        (0..40).map(move |before| {
            format!(
                "{} {phrase}, and that is not allowed.\n\n",
                "at ".repeat(before)
            )
        })
    });
    let mut all = folders(&paragraphs.collect::<String>());
    all.extend(refusals(&phrases));
    for (printer, shown) in all {
        let is_shown = String::from_utf8_lossy(&shown).lines().any(tells);
        assert!(is_shown, "{printer} shows no secret");
        let masked = masked(&redactor, &shown);
        let told: Vec<_> = masked
            .lines()
            .filter(|line| tells(line))
            .take(MOST_NAMED)
            .collect();
        assert!(told.is_empty(), "{printer}:\n{}", told.join("\n"));
    }
}

#[test]
fn what_terraform_shows_of_secrets_is_masked_whatever_character_is_in_them() {
    let values: BTreeSet<_> = every_character().into_iter().collect();
    let values: Vec<_> = values.into_iter().step_by(8).collect();
    let redactor = Redactor::new(&values);
    for (args, shown) in terraform(&values) {
        let masked = masked(&redactor, &shown);
        let lines = masked.lines().filter(|line| tells(line));
        let told: Vec<_> = lines.take(MOST_NAMED).collect();
        assert!(told.is_empty(), "terraform {args}:\n{}", told.join("\n"));
    }
}
