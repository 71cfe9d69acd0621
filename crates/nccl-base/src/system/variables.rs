//! The variables that NCCL will see in this process, and where each comes from.
//!
//! NCCL reads the process's environment, then the file that `NCCL_CONF_FILE` names or else `~/.nccl.conf`, then
//! `/etc/nccl.conf`; the first that sets a variable counts. A line of a file is everything up to the first
//! `=`, and everything behind it: blanks and quotes belong to name and value, and only a `#` in the first
//! column makes a comment.

use serde::{Deserialize, Serialize};

use super::System;
use super::nccl_variables;

/// Maximum length of a value that is reported in full; a longer one is reported by its beginning and a checksum.
const TOLD: usize = 256;

/// Maximum number of variables that are examined.
#[doc(hidden)]
pub const MOST: usize = 512;

/// NCCL's maximum lengths of a name or a value, and of a line.
const LONGEST_WORD: usize = 1023;
const LONGEST_LINE: usize = 4095;

/// A variable with the value that NCCL uses in one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[doc(hidden)]
pub struct Variable {
    pub name: String,
    pub value: String,
    /// The file that sets it; empty for the process's own environment.
    pub file: String,
}

impl Variable {
    /// Returns where the value comes from, for sentences.
    pub fn origin(&self) -> &str {
        if self.file.is_empty() {
            "the process's environment"
        } else {
            &self.file
        }
    }
}

/// Returns everything with `NCCL_` in its name, except what belongs to other programs, in the order of names.
pub fn gather(system: &System) -> Vec<Variable> {
    let mut found: Vec<Variable> = Vec::new();
    for (name, value) in system.variables() {
        add(&mut found, name, value, "");
    }
    let given = system
        .variable("NCCL_CONF_FILE")
        .filter(|path| !path.is_empty());
    let own = match (given, system.variable("HOME")) {
        (Some(path), _) => Some(path.to_owned()),
        (None, Some(home)) => Some(format!("{home}/.nccl.conf")),
        (None, None) => None,
    };
    for path in own.iter().map(String::as_str).chain(["/etc/nccl.conf"]) {
        let Ok(bytes) = system.bytes(path) else {
            continue;
        };
        for (name, value) in parse(&bytes) {
            add(&mut found, &name, &value, path);
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found.truncate(MOST);
    found
}

/// Returns NCCL's value of this variable in this process, and where it comes from; `None` for an empty text, which counts as
/// unset.
pub fn variable(name: &str) -> Option<(String, String)> {
    let found = gather(&System::real());
    let variable = found.into_iter().find(|found| found.name == name)?;
    let origin = variable.origin().to_owned();
    (!variable.value.is_empty()).then_some((variable.value, origin))
}

/// Returns the file that `NCCL_CONF_FILE` names, if it does not exist; NCCL does not report a missing file.
pub fn missing_file(system: &System) -> Option<String> {
    let path = system.variable("NCCL_CONF_FILE")?;
    (!path.is_empty() && system.bytes(path).is_err()).then(|| path.to_owned())
}

/// Adds a variable, unless an earlier source sets it.
fn add(found: &mut Vec<Variable>, name: &str, value: &str, file: &str) {
    let interesting = name.contains("NCCL_") && !nccl_variables::is_foreign(name.trim());
    if !interesting || found.iter().any(|other| other.name == name) {
        return;
    }
    found.push(Variable {
        name: name.to_owned(),
        value: shortened(value),
        file: file.to_owned(),
    });
}

fn shortened(value: &str) -> String {
    if value.len() <= TOLD {
        return value.to_owned();
    }
    let mut end = TOLD;
    while !value.is_char_boundary(end) {
        end -= 1;
    }
    let sum = crate::wire::checksum(value.as_bytes());
    format!("{}… ({} bytes, {sum:016x})", &value[..end], value.len())
}

/// Returns the names and values of a file, in its order, as NCCL reads them.
pub fn parse(bytes: &[u8]) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| {
        let bytes = &bytes[..bytes.len().min(LONGEST_WORD)];
        String::from_utf8_lossy(bytes).into_owned()
    };
    let mut pairs = Vec::new();
    // NCCL reads a longer line as several.
    let lines = bytes.split(|&byte| byte == b'\n');
    for line in lines.flat_map(|line| line.chunks(LONGEST_LINE)) {
        // A NUL ends a line as well.
        let line = line.split(|&byte| byte == 0).next().unwrap_or_default();
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.first() == Some(&b'#') {
            continue;
        }
        let Some(equals) = line.iter().position(|&byte| byte == b'=') else {
            continue;
        };
        // A variable needs a name.
        if equals > 0 {
            pairs.push((text(&line[..equals]), text(&line[equals + 1..])));
        }
    }
    pairs
}

/// Returns NCCL's value of a text, if it is a number: decimal, `0x…` or `0…`, up to the first character that
/// is no digit.
pub fn number(value: &str) -> Option<i64> {
    let text = value.trim_start();
    let (negative, text) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let hexadecimal = text.strip_prefix("0x").or(text.strip_prefix("0X"));
    let (digits, radix) = match hexadecimal {
        Some(digits) if digits.starts_with(|c: char| c.is_ascii_hexdigit()) => (digits, 16),
        _ if text.starts_with('0') => (text, 8),
        _ => (text, 10),
    };
    let end = digits
        .find(|c: char| !c.is_digit(radix))
        .unwrap_or(digits.len());
    let number = i64::from_str_radix(&digits[..end], radix).ok()?;
    Some(if negative { -number } else { number })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(found: &[Variable]) -> Vec<(&str, &str, &str)> {
        found
            .iter()
            .map(|v| (&v.name[..], &v.value[..], &v.file[..]))
            .collect()
    }

    #[test]
    fn the_environment_goes_before_the_users_file_and_that_before_the_systems() {
        let root = super::super::fake_tree::Tree::new();
        root.write(
            "home/me/.nccl.conf",
            "NCCL_ALGO=Ring\nNCCL_PROTO=LL\nNCCL_ALGO=Tree\n",
        );
        root.write(
            "etc/nccl.conf",
            "NCCL_PROTO=Simple\nNCCL_NTHREADS=256\nPATH=/x\n",
        );
        let variables = [
            ("HOME", "/home/me"),
            ("NCCL_ALGO", "PAT"),
            ("NCCL_RUN_SECRET", "hush"),
        ];
        let found = gather(&System::fake(root.path(), &variables));
        assert_eq!(
            names(&found),
            [
                ("NCCL_ALGO", "PAT", ""),
                ("NCCL_NTHREADS", "256", "/etc/nccl.conf"),
                ("NCCL_PROTO", "LL", "/home/me/.nccl.conf"),
            ]
        );
    }

    #[test]
    fn a_named_file_takes_the_place_of_the_users_and_is_missed_when_it_is_not_there() {
        let root = super::super::fake_tree::Tree::new();
        root.write("home/me/.nccl.conf", "NCCL_ALGO=Ring\n");
        root.write("job.conf", "NCCL_PROTO=LL\n");
        let variables = [("HOME", "/home/me"), ("NCCL_CONF_FILE", "/job.conf")];
        let system = System::fake(root.path(), &variables);
        let found = gather(&system);
        assert_eq!(
            names(&found),
            [
                ("NCCL_CONF_FILE", "/job.conf", ""),
                ("NCCL_PROTO", "LL", "/job.conf")
            ]
        );
        assert_eq!(missing_file(&system), None);
        let variables = [("HOME", "/home/me"), ("NCCL_CONF_FILE", "/other.conf")];
        let system = System::fake(root.path(), &variables);
        assert_eq!(missing_file(&system).as_deref(), Some("/other.conf"));
        // An empty name counts as unset.
        let variables = [("HOME", "/home/me"), ("NCCL_CONF_FILE", "")];
        let system = System::fake(root.path(), &variables);
        assert!(gather(&system).iter().any(|v| v.value == "Ring"));
    }

    #[test]
    fn lines_are_read_as_nccl_reads_them() {
        let pairs = |text: &str| parse(text.as_bytes());
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            pairs("# NCCL_A=1\nNCCL_B=2\r\nno equals\n=x\n"),
            [pair("NCCL_B", "2")]
        );
        assert_eq!(pairs(" NCCL_A = \"1\" "), [pair(" NCCL_A ", " \"1\" ")]);
        assert_eq!(pairs("NCCL_A=b=c"), [pair("NCCL_A", "b=c")]);
        assert_eq!(pairs("NCCL_A=1\0NCCL_B=2"), [pair("NCCL_A", "1")]);
        let long = format!("NCCL_A={}", "x".repeat(5000));
        assert_eq!(pairs(&long), [pair("NCCL_A", &"x".repeat(1023))]);
    }

    #[test]
    fn no_file_makes_the_parser_panic_or_give_more_than_nccl_takes() {
        let seeds: [&[u8]; 4] = [
            b"NCCL_ALGO=Ring\n#c\r\nNCCL_PROTO=LL",
            b"=\n==\n\0\n#\n \n",
            b"export NCCL_X=\"a b\"\xff\xfe\n",
            b"NCCL_SOCKET_IFNAME=^docker,lo\n",
        ];
        let mut random = fastrand::Rng::with_seed(11);
        let mut some = 0;
        for round in 0..20_000 {
            let mut bytes = random.choice(&seeds).unwrap().to_vec();
            for _ in 0..random.usize(0..6) {
                let at = random.usize(..bytes.len());
                match random.u8(..4) {
                    0 => bytes[at] = random.u8(..),
                    1 => bytes.insert(at, *random.choice(b"=\n\r\0# ").unwrap()),
                    2 => bytes.truncate(at + 1),
                    _ => bytes.extend(std::iter::repeat_n(b'y', random.usize(..5000))),
                }
            }
            for (name, value) in parse(&bytes) {
                some += 1;
                assert!(!name.is_empty() && !name.contains('='));
                // A byte that is not UTF-8 is shown as three bytes.
                assert!(name.len() <= 3 * 1023 && value.len() <= 3 * 1023);
                let _ = (number(&value), nccl_variables::find(&name));
                if round % 50 == 0 {
                    let _ = nccl_variables::closest(&name);
                }
            }
        }
        assert!(some > 10_000, "{some}");
    }

    #[test]
    fn numbers_are_read_as_c_reads_them() {
        for (text, value) in [
            ("12", Some(12)),
            (" -3x", Some(-3)),
            ("0x10", Some(16)),
            ("010", Some(8)),
            ("+7", Some(7)),
            ("0", Some(0)),
            ("0xz", Some(0)),
            ("", None),
            ("x", None),
            ("-", None),
        ] {
            assert_eq!(number(text), value, "{text:?}");
        }
    }
}
