//! `site`: makes a site with search from the pages of `docs/`, by mdBook, and fails for every broken link in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::arguments::Arguments;
use crate::{Result, links, workspace};

/// The release of mdBook to install if there is none.
const MDBOOK: &str = "0.5.4";

/// Pages beside `docs/` that are part of the site, and their names there.
const OTHERS: [(&str, &str); 3] = [
    ("nccl/errors.md", "errors.md"),
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("CONTRIBUTING.md", "CONTRIBUTING.md"),
];

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    let root = workspace::root();
    let book = root.join("target/site");
    let source = book.join("src");
    if book.exists() {
        fs::remove_dir_all(&book)?;
    }
    fs::create_dir_all(&source)?;
    let names = names(root)?;
    for (page, name) in &names {
        let text = fs::read_to_string(root.join(page))?;
        let to = source.join(name);
        fs::create_dir_all(to.parent().ok_or("a page has a directory")?)?;
        fs::write(to, with_links_of_the_site(page, name, &text, &names))?;
    }
    for picture in [
        "docs/flight-recorder.png",
        "docs/results/against-mpi.svg",
        "docs/results/elastic_death.svg",
        "docs/results/faults.svg",
    ] {
        let name = Path::new(picture).strip_prefix("docs")?;
        fs::copy(root.join(picture), source.join(name))?;
    }
    let index = fs::read_to_string(root.join("docs/README.md"))?;
    fs::write(source.join("SUMMARY.md"), summary(&index, &names))?;
    fs::write(
        book.join("book.toml"),
        "[book]\ntitle = \"nccl\"\n[output.html]\nno-section-label = true\n[output.html.search]\nuse-boolean-and = true\n",
    )?;
    workspace::run(Command::new(mdbook(root)?).arg("build").arg(&book))?;
    let html = book.join("book");
    check(&html)?;
    eprintln!("site: {}", html.join("index.html").display());
    Ok(())
}

/// Returns the pages of the site: their paths in the repository, and in the site.
fn names(root: &Path) -> Result<BTreeMap<PathBuf, PathBuf>> {
    let mut names = BTreeMap::new();
    for page in links::pages(root)? {
        if let Ok(name) = page.strip_prefix("docs") {
            names.insert(page.clone(), name.to_owned());
        }
    }
    names.extend(OTHERS.map(|(page, name)| (PathBuf::from(page), PathBuf::from(name))));
    Ok(names)
}

/// Returns the text of a page with its links adapted to the site. Links to other files of the repository become plain text.
fn with_links_of_the_site(
    page: &Path,
    name: &Path,
    text: &str,
    names: &BTreeMap<PathBuf, PathBuf>,
) -> String {
    let mut made = String::new();
    let mut kept = 0;
    for link in links::of_page(text) {
        let Some((target, anchor)) = links::local(page, link.target) else {
            continue;
        };
        let is_picture = text[..link.whole.start].ends_with('!');
        if is_picture || target == page {
            continue;
        }
        made.push_str(&text[kept..link.whole.start]);
        kept = link.whole.end;
        match names.get(&target) {
            Some(target) => {
                let up = "../".repeat(name.components().count() - 1);
                let anchor = anchor.map_or_else(String::new, |anchor| format!("#{anchor}"));
                made.push_str(&format!(
                    "[{}]({up}{}{anchor})",
                    link.text,
                    target.display()
                ));
            }
            None => made.push_str(link.text),
        }
    }
    made.push_str(&text[kept..]);
    made
}

/// Returns the table of contents: the headings and links of the index, and the remaining pages.
fn summary(index: &str, names: &BTreeMap<PathBuf, PathBuf>) -> String {
    let mut summary = String::from("# Summary\n\n[Documentation](README.md)\n");
    let mut listed = BTreeSet::from([PathBuf::from("README.md")]);
    let mut links = links::of_page(index).into_iter().peekable();
    let mut place = 0;
    for line in index.split_inclusive('\n') {
        let end = place + line.len();
        if let Some(part) = line.strip_prefix("## ") {
            summary.push_str(&format!("\n# {}\n\n", part.trim()));
        }
        while let Some(link) = links.next_if(|link| link.whole.start < end) {
            let target = links::local(Path::new("docs/README.md"), link.target);
            let name = target.and_then(|(target, _)| names.get(&target));
            if let Some(name) = name.filter(|name| listed.insert((*name).clone())) {
                let title = link.text.replace('`', "");
                summary.push_str(&format!("- [{title}]({})\n", name.display()));
            }
        }
        place = end;
    }
    summary.push_str("\n# More\n\n");
    for name in names.values().filter(|name| !listed.contains(*name)) {
        let title = name.with_extension("");
        summary.push_str(&format!("- [{}]({})\n", title.display(), name.display()));
    }
    summary
}

/// Returns mdBook: that of the machine, or one installed in `.cache`.
fn mdbook(root: &Path) -> Result<PathBuf> {
    if Command::new("mdbook")
        .arg("--version")
        .output()
        .is_ok_and(|found| found.status.success())
    {
        return Ok(PathBuf::from("mdbook"));
    }
    let tools = root.join(".cache/tools");
    let program = tools.join("bin/mdbook");
    if !program.exists() {
        let mut install = workspace::cargo();
        install.args([
            "install",
            "mdbook",
            "--locked",
            "--version",
            MDBOOK,
            "--no-default-features",
        ]);
        install.args(["--features", "search", "--root"]).arg(&tools);
        workspace::run(&mut install)?;
    }
    Ok(program)
}

/// Fails for links of the site that lead to a missing page or anchor.
fn check(html: &Path) -> Result {
    let mut pages = BTreeMap::new();
    let mut open = vec![html.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else if path
                .extension()
                .is_some_and(|extension| extension == "html")
            {
                let text = fs::read_to_string(&path)?;
                pages.insert(path, text);
            }
        }
    }
    let mut broken = Vec::new();
    let mut checked = 0;
    for (path, text) in &pages {
        // These pages repeat the others.
        if path.ends_with("print.html") || path.ends_with("404.html") || path.ends_with("toc.html")
        {
            continue;
        }
        for target in values(text, "href=\"") {
            let Some((target, anchor)) = links::local(path, target) else {
                continue;
            };
            checked += 1;
            let is_there = match (pages.get(&target), anchor) {
                (Some(page), Some(anchor)) => {
                    anchor.is_empty() || values(page, "id=\"").any(|id| id == anchor)
                }
                (Some(_), None) => true,
                (None, _) => target.exists(),
            };
            if !is_there {
                let anchor = anchor.unwrap_or_default();
                broken.push(format!("{}: {}#{anchor}", path.display(), target.display()));
            }
        }
    }
    eprintln!("site: {} pages, {checked} links", pages.len());
    match broken.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "links of the site that lead nowhere:\n{}",
            broken.join("\n")
        )
        .into()),
    }
}

/// The values of an attribute.
fn values<'t>(text: &'t str, attribute: &str) -> impl Iterator<Item = &'t str> {
    text.split(attribute)
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_to_pages_of_the_site_and_others_become_their_text() {
        let names = BTreeMap::from([
            (PathBuf::from("docs/a.md"), PathBuf::from("a.md")),
            (
                PathBuf::from("docs/results/b.md"),
                PathBuf::from("results/b.md"),
            ),
            (PathBuf::from("nccl/errors.md"), PathBuf::from("errors.md")),
        ]);
        let of = |page: &str, name: &str, text: &str| {
            with_links_of_the_site(Path::new(page), Path::new(name), text, &names)
        };
        assert_eq!(
            of(
                "docs/a.md",
                "a.md",
                "[e](../nccl/errors.md#x) [s](../src/lib.rs) [b](results/b.md) [x](#x)"
            ),
            "[e](errors.md#x) s [b](results/b.md) [x](#x)"
        );
        assert_eq!(
            of("docs/results/b.md", "results/b.md", "[a](../a.md)"),
            "[a](../a.md)"
        );
    }

    #[test]
    fn the_index_becomes_a_table_of_contents() {
        let names = BTreeMap::from([
            (PathBuf::from("docs/a.md"), PathBuf::from("a.md")),
            (PathBuf::from("docs/b.md"), PathBuf::from("b.md")),
        ]);
        let summary = summary(
            "# D\n\n## First\n\n[The `A`](a.md) · [again](a.md)\n",
            &names,
        );
        assert!(
            summary.contains("# First\n\n- [The A](a.md)\n\n# More\n\n- [b](b.md)\n"),
            "{summary}"
        );
    }
}
