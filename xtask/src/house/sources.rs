//! The files of a crate: their modules, what they define and use, and how much of them is code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::Result;

pub(super) struct Sources {
    /// The first is the crate's root.
    pub(super) files: Vec<File>,
}

/// A file that is compiled without `cfg(test)`.
pub(super) struct File {
    /// Below `src`.
    pub(super) path: String,
    /// Its module, without `crate`.
    pub(super) module: Vec<String>,
    /// Lines that are neither blank nor comments nor tests.
    pub(super) code: usize,
    /// Names that its `use` items bring in, and what they stand for.
    pub(super) imports: BTreeMap<String, Vec<String>>,
    /// Modules of which it takes all names.
    pub(super) globs: Vec<Vec<String>>,
    /// Paths that begin with `crate`, `self` or `super`, from the root.
    pub(super) paths: BTreeSet<Vec<String>>,
    /// Types of which it has inherent methods.
    pub(super) inherent: BTreeSet<String>,
}

/// The files of the crate whose root is `directory/lib.rs`.
pub(super) fn read(directory: &Path) -> Result<Sources> {
    let mut files = Vec::new();
    let mut waiting = vec![(String::from("lib.rs"), Vec::new())];
    while let Some((path, module)) = waiting.pop() {
        let (file, children) = read_file(directory, path, module)?;
        files.push(file);
        waiting.extend(children);
    }
    Ok(Sources { files })
}

/// Files, by their path below `src`, and their modules.
type Children = Vec<(String, Vec<String>)>;

fn read_file(directory: &Path, path: String, module: Vec<String>) -> Result<(File, Children)> {
    let text = fs::read_to_string(directory.join(&path))
        .map_err(|error| format!("cannot read {path}: {error}"))?;
    let parsed = syn::parse_file(&text).map_err(|error| format!("{path}: {error}"))?;
    let mut reader = Reader {
        module: module.clone(),
        tests: Vec::new(),
        imports: BTreeMap::new(),
        globs: Vec::new(),
        paths: BTreeSet::new(),
        inherent: BTreeSet::new(),
        children: Vec::new(),
    };
    reader.visit_file(&parsed);
    let is_test = |line: usize| {
        let mut tests = reader.tests.iter();
        tests.any(|&(first, last)| (first..=last).contains(&line))
    };
    let code = text
        .lines()
        .enumerate()
        .filter(|(at, line)| {
            let line = line.trim_start();
            !line.is_empty() && !line.starts_with("//") && !is_test(at + 1)
        })
        .count();
    let mut children = Vec::new();
    for (name, other_path) in &reader.children {
        let mut child = module.clone();
        child.push(name.clone());
        children.push((
            find(directory, &path, &module, name, other_path.as_deref())?,
            child,
        ));
    }
    let file = File {
        path,
        module,
        code,
        imports: reader.imports,
        globs: reader.globs,
        paths: reader.paths,
        inherent: reader.inherent,
    };
    Ok((file, children))
}

/// Where `mod name;` of a file is.
fn find(
    directory: &Path,
    path: &str,
    module: &[String],
    name: &str,
    other_path: Option<&str>,
) -> Result<String> {
    if let Some(other) = other_path {
        let beside = Path::new(path).parent().unwrap_or(Path::new(""));
        return Ok(beside.join(other).to_string_lossy().into_owned());
    }
    let below = module.join("/");
    let below = if below.is_empty() { below } else { below + "/" };
    let candidates = [format!("{below}{name}.rs"), format!("{below}{name}/mod.rs")];
    candidates
        .into_iter()
        .find(|candidate| directory.join(candidate).is_file())
        .ok_or_else(|| format!("{path}: there is no file of `mod {name}`").into())
}

struct Reader {
    module: Vec<String>,
    /// First and last lines of what only tests have.
    tests: Vec<(usize, usize)>,
    imports: BTreeMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
    paths: BTreeSet<Vec<String>>,
    inherent: BTreeSet<String>,
    children: Vec<(String, Option<String>)>,
}

/// Whether an item exists in tests alone.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if attribute.path().is_ident("cfg") => {
            let said = list.tokens.to_string();
            said == "test" || said.starts_with("all (test") || said.starts_with("all(test")
        }
        _ => attribute.path().is_ident("test"),
    })
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    use syn::Item;
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

impl Reader {
    /// A path from the crate's root, if it begins with `crate`, `self` or `super`.
    fn below_root(&self, path: &[String]) -> Option<Vec<String>> {
        let (first, mut rest) = path.split_first()?;
        let mut base = match first.as_str() {
            "crate" => Vec::new(),
            "self" => self.module.clone(),
            "super" => {
                let mut base = self.module.clone();
                base.pop();
                base
            }
            _ => return None,
        };
        while let Some((next, others)) = rest.split_first()
            && next == "super"
        {
            base.pop();
            rest = others;
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    fn import(&mut self, mut prefix: Vec<String>, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.import(prefix, &path.tree);
            }
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(prefix.clone(), tree);
                }
            }
            syn::UseTree::Name(name) => {
                let name = name.ident.to_string();
                match name.as_str() {
                    "self" => {
                        let name = prefix.last().cloned().unwrap_or_default();
                        self.bring_in(name, prefix);
                    }
                    _ => {
                        prefix.push(name.clone());
                        self.bring_in(name, prefix);
                    }
                }
            }
            syn::UseTree::Rename(rename) => {
                if rename.ident != "self" {
                    prefix.push(rename.ident.to_string());
                }
                self.bring_in(rename.rename.to_string(), prefix);
            }
            syn::UseTree::Glob(_) => {
                if let Some(path) = self.of_this_crate(&prefix) {
                    self.globs.push(path);
                }
            }
        }
    }

    /// As [`below_root`](Self::below_root); a path may begin with a child's name as well, which is found out later.
    fn of_this_crate(&self, path: &[String]) -> Option<Vec<String>> {
        self.below_root(path).or_else(|| {
            let mut below = self.module.clone();
            below.extend_from_slice(path);
            Some(below)
        })
    }

    fn bring_in(&mut self, name: String, path: Vec<String>) {
        if let Some(path) = self.of_this_crate(&path) {
            self.imports.insert(name, path);
        }
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = attributes(item);
        if is_test(attributes) {
            let first = attributes
                .first()
                .map_or(item.span().start().line, |attribute| {
                    attribute.span().start().line
                });
            self.tests.push((first, item.span().end().line));
            return;
        }
        match item {
            syn::Item::Use(item) => self.import(Vec::new(), &item.tree),
            syn::Item::Mod(item) if item.content.is_none() => {
                let path = item
                    .attrs
                    .iter()
                    .find_map(|attribute| match &attribute.meta {
                        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => {
                            match &pair.value {
                                syn::Expr::Lit(syn::ExprLit {
                                    lit: syn::Lit::Str(text),
                                    ..
                                }) => Some(text.value()),
                                _ => None,
                            }
                        }
                        _ => None,
                    });
                self.children.push((item.ident.to_string(), path));
            }
            syn::Item::Impl(item) => {
                if let (None, syn::Type::Path(of)) = (&item.trait_, &*item.self_ty)
                    && let Some(last) = of.path.segments.last()
                {
                    self.inherent.insert(last.ident.to_string());
                }
                visit::visit_item_impl(self, item);
            }
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string())
            .collect();
        if let Some(path) = self.below_root(&names) {
            self.paths.insert(path);
        }
        visit::visit_path(self, path);
    }
}
