//! Lists of made-up crates, documented by this machine's rustdoc: as one crate, and with parts moved to others.

use super::*;
use std::process::Command;

use super::document::Json;

/// A shop in one crate: an item with two paths, a trait and its implementor, an alias, generics, a macro, a sealed
/// trait, a renamed item, `*`, and a constant.
const WHOLE: &str = r#"
    mod error;
    pub mod tickets;
    pub use error::{Error, Kind as ErrorKind, Result};
    pub use tickets::Ticket;
    pub mod desk { pub use crate::tickets::till::*; pub struct Desk; }
    mod sealed { pub trait Sealed {} impl Sealed for super::Ticket {} }
    pub trait Seen: sealed::Sealed { fn look(&self) -> Result<u32> { Ok(0) } }
    impl Seen for Ticket {}
    impl tickets::Serve for desk::Desk {
        type Turn = Ticket;
        fn serve(&self, turn: Ticket) -> Result<()> { drop(turn); Ok(()) }
    }
    impl From<desk::Desk> for Error { fn from(_: desk::Desk) -> Self { Error { kind: ErrorKind::Late(1) } } }
    pub fn open(ticket: &Ticket, of: &tickets::till::Till<Ticket>) -> Result<desk::Desk> {
        drop((ticket, of));
        Ok(desk::Desk)
    }
"#;

const ERROR: &str = r#"
    #[derive(Debug, Clone)]
    pub struct Error { pub kind: Kind }
    #[derive(Debug, Clone)]
    #[non_exhaustive]
    pub enum Kind { Late(u32), Lost { ticket: u32 } }
    pub type Result<T> = std::result::Result<T, Error>;
    impl std::fmt::Display for Error {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { write!(f, "{:?}", self.kind) }
    }
    impl std::error::Error for Error {}
    #[macro_export]
    macro_rules! late { ($by:expr) => { $by } }
"#;

const TICKETS: &str = r#"
    use crate::error::Result;
    /// Never shown.
    #[doc(hidden)]
    pub fn hidden() {}
    #[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Ticket(u32);
    impl Ticket {
        pub const FIRST: Ticket = Ticket(0);
        pub fn wait<T: AsRef<Ticket>>(&self, others: &[T]) -> Result<Ticket> { drop(others.len()); Ok(*self) }
        #[doc(hidden)]
        pub fn raw(&self) -> u32 { self.0 }
    }
    pub trait Serve { type Turn; const LIMIT: usize = 3; fn serve(&self, turn: Self::Turn) -> Result<()>; }
    pub const LIMIT: usize = 7;
    pub mod till {
        pub struct Till<T> { pub next: Option<T> }
        impl<T: super::Serve> Till<T> { pub fn turns(&self) -> impl Iterator<Item = &T> { self.next.iter() } }
    }
"#;

/// A directory in which crates are built, dependencies first.
struct Crates {
    directory: tempfile::TempDir,
    built: Vec<&'static str>,
}

impl Crates {
    fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
            built: Vec::new(),
        }
    }

    /// Builds and documents a crate of these files, the first of which is its root.
    fn document(&mut self, name: &'static str, is_listed: bool, files: &[(&str, &str)]) -> Json {
        let file = self.build(name, files);
        document::read(&file, is_listed).unwrap()
    }

    fn build(&mut self, name: &'static str, files: &[(&str, &str)]) -> PathBuf {
        let source = self.directory.path().join(name);
        fs::create_dir(&source).unwrap();
        for (file, text) in files {
            fs::write(source.join(file), text).unwrap();
        }
        for program in ["rustc", "rustdoc"] {
            let mut command = Command::new(program);
            command
                .current_dir(self.directory.path())
                .args(["--edition=2024", "--crate-type=lib", "--crate-name", name])
                .arg(source.join(files[0].0))
                .env("RUSTC_BOOTSTRAP", "1");
            for other in &self.built {
                command.arg(format!("--extern={other}=lib{other}.rmeta"));
            }
            match program {
                "rustc" => command.args(["--emit=metadata", "--cap-lints=allow"]),
                _ => command.args(["-Zunstable-options", "--output-format=json", "-oout"]),
            };
            workspace::run(&mut command).unwrap();
        }
        self.built.push(name);
        self.directory.path().join(format!("out/{name}.json"))
    }

    fn list(&self, own: &Documented, others: &[&Documented]) -> BTreeSet<String> {
        let json = joined::join(own, others).unwrap();
        lines(&json, &self.directory.path().join("joined.json")).unwrap()
    }
}

/// Whether the JSON of this machine's rustdoc can be read; prints a message if not.
fn is_readable() -> bool {
    let mut crates = Crates::new();
    let file = crates.build("empty", &[("lib.rs", "")]);
    let read = document::read(&file, true);
    if let Err(error) = &read {
        eprintln!("NOT TESTED: {error}");
    }
    read.is_ok()
}

fn alone(own: Json) -> Documented {
    Documented {
        own,
        parts: Vec::new(),
    }
}

fn whole() -> (Crates, Documented) {
    let mut crates = Crates::new();
    let files = [
        ("lib.rs", WHOLE),
        ("error.rs", ERROR),
        ("tickets.rs", TICKETS),
    ];
    let shop = alone(crates.document("shop", true, &files));
    (crates, shop)
}

/// The shop with its errors in one crate, which has no list, and its tickets in another.
fn moved(tickets: &str) -> (Crates, Documented) {
    let mut crates = Crates::new();
    let root = format!("mod inner {{ {ERROR} }} pub mod error {{ pub use crate::inner::*; }}");
    let errors = crates.document("shop_errors", false, &[("lib.rs", &root)]);
    let tickets = tickets.replace("crate::error", "shop_errors::error");
    let tickets = crates.document("shop_tickets", false, &[("lib.rs", &tickets)]);
    let root = WHOLE
        .replace("mod error;", "pub use shop_errors::late;")
        .replace("pub mod tickets;", "pub use shop_tickets as tickets;")
        .replace("use error::", "use shop_errors::error::");
    let own = crates.document("shop", true, &[("lib.rs", &root)]);
    let parts = vec![errors, tickets];
    (crates, Documented { own, parts })
}

#[test]
fn items_that_move_to_another_crate_and_are_re_exported_keep_their_lines() {
    if !is_readable() {
        return;
    }
    let (crates, shop) = whole();
    let before = crates.list(&shop, &[]);
    let (crates, shop) = moved(TICKETS);
    let written: String = before.iter().map(|line| format!("{line}\n")).collect();
    let after = crates.list(&shop, &[]);
    assert_eq!(differences("shop.txt", &written, &after), "");
    for line in [
        "pub macro shop::late!",
        "pub shop::ErrorKind::Late(u32)",
        "pub fn shop::open(&shop::Ticket, &shop::desk::Till<shop::Ticket>) -> shop::Result<shop::desk::Desk>",
        "pub struct shop::tickets::Ticket(_)",
        "pub struct shop::Ticket(_)",
        "pub trait shop::Seen: Sealed",
        "impl core::marker::Send for shop::Ticket",
    ] {
        assert!(after.contains(line), "{line} is not in\n{written}");
    }
    let unwanted = ["hidden", "raw", "Freeze", "shop_", "<<", "Structural"];
    for line in &after {
        assert!(!unwanted.iter().any(|part| line.contains(part)), "{line}");
    }
}

#[test]
fn what_a_move_changes_is_seen() {
    if !is_readable() {
        return;
    }
    let (crates, shop) = whole();
    let before: String = crates
        .list(&shop, &[])
        .iter()
        .map(|line| format!("{line}\n"))
        .collect();
    let other = TICKETS
        .replace("pub const LIMIT: usize = 7;", "")
        .replace("pub next: Option<T>", "pub next: Option<T>, pub last: u64");
    let (crates, shop) = moved(&other);
    assert_eq!(
        differences("shop.txt", &before, &crates.list(&shop, &[])),
        "shop.txt: 1 removed, 2 added\n\
         - pub const shop::tickets::LIMIT: usize\n\
         + pub shop::desk::Till::last: u64\n\
         + pub shop::tickets::till::Till::last: u64\n"
    );
}

#[test]
fn a_listed_crate_is_one_line_in_another_list_and_names_its_own_types() {
    if !is_readable() {
        return;
    }
    let (mut crates, shop) = whole();
    let root = "pub use shop; pub use shop::Ticket as Paper;
        pub fn buy(paper: Paper) -> shop::desk::Desk { drop(paper); shop::desk::Desk }";
    let street = alone(crates.document("street", true, &[("lib.rs", root)]));
    let lines = crates.list(&street, &[&shop]);
    assert!(lines.contains("pub use street::shop"), "{lines:?}");
    assert!(lines.contains("pub fn street::buy(street::Paper) -> shop::desk::Desk"));
    assert!(lines.contains("pub const street::Paper::FIRST: street::Paper"));
    assert!(!lines.iter().any(|line| line.contains("street::shop::")));
}

#[test]
fn differences_are_told_line_by_line() {
    let lines: BTreeSet<String> = ["pub fn a()", "pub fn c()"].map(str::to_owned).into();
    assert_eq!(differences("a.txt", "pub fn a()\npub fn c()\n", &lines), "");
    assert_eq!(
        differences("a.txt", "pub fn a()\npub fn b()\n", &lines),
        "a.txt: 1 removed, 1 added\n- pub fn b()\n+ pub fn c()\n"
    );
}

#[test]
fn a_list_that_is_written_does_not_differ() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("lists/a.txt");
    let lines: BTreeSet<String> = ["pub mod a", "pub fn a::b()"].map(str::to_owned).into();
    let missing = compare(&file, &lines).unwrap_err().to_string();
    assert!(missing.contains("--write"), "{missing}");
    write_list(&file, &lines).unwrap();
    assert_eq!(
        fs::read_to_string(&file).unwrap(),
        "pub fn a::b()\npub mod a\n"
    );
    assert_eq!(compare(&file, &lines).unwrap(), "");
}
