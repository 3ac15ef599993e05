//! Finds a model on disk, and reads its small files.
//!
//! A model folder is untrusted: the library reads regular files that lie inside it and
//! nothing else. A folder of the local Hugging Face cache is full of links into the `blobs` folders
//! beside it, so those count as inside for such a folder.
//!
//! ```text
//! <cache>/blobs/<2 hex>/<hash>                           shared by all repositories (newer caches)
//! <cache>/models--<org>--<name>/refs/main                the hash of the snapshot
//! <cache>/models--<org>--<name>/snapshots/<hash>/<file>  -> ../../blobs/<etag>
//! <cache>/models--<org>--<name>/blobs/<etag>
//! ```

use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use crate::error::{try_with_capacity, Error, ErrorKind, Result};

/// The maximum length of a file name on common file systems, in bytes.
const MAX_FILE_NAME_BYTES: usize = 255;
/// The maximum length of a ref file: a commit hash has 40 characters, so a longer file is not a
/// ref.
const MAX_REF_BYTES: usize = 256;

/// The beginning of the text that Git LFS leaves in place of a large file
/// (<https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md>).
pub(super) const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// The folder of a model and the places that its files may link to.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    /// Canonical folders; the canonical path of every file read lies inside one of them.
    roots: Vec<PathBuf>,
}

/// A stamp of one state of a file, to notice that it was replaced, cut or rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    /// The length in bytes.
    pub len: u64,
    device: u64,
    inode: u64,
    modified_s: i64,
    modified_ns: i64,
}

impl FileStamp {
    fn new(metadata: &Metadata) -> Self {
        FileStamp {
            len: metadata.len(),
            device: metadata.dev(),
            inode: metadata.ino(),
            modified_s: metadata.mtime(),
            modified_ns: metadata.mtime_nsec(),
        }
    }

    /// Returns the time of the last modification: seconds since 1970, and nanoseconds.
    pub(super) fn modified(&self) -> (i64, i64) {
        (self.modified_s, self.modified_ns)
    }

    /// Fails unless `file`, which is called `name`, is still in this state.
    pub fn check(self, file: &File, name: &str) -> Result<()> {
        let metadata = file.metadata().map_err(|e| io_error(&shown_name(name), &e))?;
        if FileStamp::new(&metadata) == self {
            return Ok(());
        }
        let message = format!("{} changed while it was read", shown_name(name));
        Err(Error::new(ErrorKind::Io, message))
    }
}

impl Folder {
    /// Opens the folder at `path`, which must exist.
    pub fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let canonical =
            path.canonicalize().map_err(|e| io_error(&format!("folder {shown}"), &e))?;
        if !is_folder(&canonical)? {
            return Err(Error::invalid_argument(format!(
                "{shown} is not a folder; pass the folder that holds config.json"
            )));
        }
        let mut roots = vec![canonical.clone()];
        roots.extend(blob_folders(&canonical)?);
        Ok(Folder { path: path.to_path_buf(), roots })
    }

    /// Returns the folder as the caller named it, or as it was found in the cache.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is something called `name` (of whatever kind) in the folder. Fails where that
    /// cannot be found out.
    pub fn contains(&self, name: &str) -> Result<bool> {
        if check_file_name(name).is_err() {
            return Ok(false);
        }
        found(self.path.join(name).symlink_metadata(), &shown_name(name)).map(|is| is.is_some())
    }

    /// Returns the folder `name` in this one, if there is one. Its files may be links to where
    /// those of this one may be.
    pub fn subfolder(&self, name: &str) -> Result<Option<Folder>> {
        check_file_name(name)?;
        let path = self.path.join(name);
        Ok(is_folder(&path)?.then(|| Folder { path, roots: self.roots.clone() }))
    }

    /// Returns the names in the folder that are UTF-8, in order, at most `limit` of them: for
    /// messages. None where the folder cannot be listed.
    pub fn some_names(&self, limit: usize) -> Vec<String> {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().take(limit);
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// Opens the regular file `name` of this folder for reading.
    ///
    /// `name` is a plain file name. Links are followed and must end inside the folder (or the
    /// cache's blobs). Pipes, devices, sockets and folders are refused without being read: opening
    /// does not wait for a pipe's writer.
    pub fn open_file(&self, name: &str) -> Result<(File, FileStamp)> {
        check_file_name(name)?;
        let path = self.path.join(name);
        let canonical = path.canonicalize().map_err(|e| io_error(&shown_name(name), &e))?;
        if !self.roots.iter().any(|root| canonical.starts_with(root)) {
            return Err(Error::invalid_file(format!(
                "{} is a link that leads out of the model folder {}",
                shown_name(name),
                self.path.display()
            )));
        }
        open_regular(&canonical, &shown_name(name))
    }

    /// Returns the whole content of the file `name`, which may have at most `limit_bytes`.
    pub fn read_small_file(&self, name: &str, limit_bytes: usize) -> Result<Vec<u8>> {
        let (file, stamp) = self.open_file(name)?;
        let too_large = || {
            Error::invalid_file(format!(
                "{} is larger than the {limit_bytes} bytes that such a file may have",
                shown_name(name)
            ))
        };
        let expected = usize::try_from(stamp.len).unwrap_or(usize::MAX);
        if expected > limit_bytes {
            return Err(too_large());
        }
        // One more byte of room, so that the read that meets the end does not grow the vector; a
        // file that grows meanwhile is cut off at that byte and refused below.
        let mut bytes: Vec<u8> = try_with_capacity(expected.saturating_add(1), name)?;
        (&file)
            .take(expected as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(|e| io_error(&shown_name(name), &e))?;
        // Bytes of two states of a file may look like those of one.
        stamp.check(&file, name)?;
        if bytes.len() != expected {
            return Err(Error::new(
                ErrorKind::Io,
                format!("{} changed while it was read", shown_name(name)),
            ));
        }
        refuse_lfs_pointer(name, &bytes)?;
        Ok(bytes)
    }

    /// Reads a file as [`Folder::read_small_file`] does; `None` if there is no such file.
    pub fn read_optional_file(&self, name: &str, limit_bytes: usize) -> Result<Option<Vec<u8>>> {
        if !self.contains(name)? {
            return Ok(None);
        }
        match self.read_small_file(name, limit_bytes) {
            // The name exists, so proceeding as if there were no file would hide a damaged folder.
            Err(error) if error.kind() == ErrorKind::NotFound => Err(Error::invalid_file(format!(
                "{} is a link to a file that is not there",
                shown_name(name)
            ))),
            other => other.map(Some),
        }
    }
}

/// Opens the regular file at `canonical`, a path without links, for reading; `shown` is its name in
/// messages. Pipes, devices, sockets and folders are refused without being read.
pub(super) fn open_regular(canonical: &Path, shown: &str) -> Result<(File, FileStamp)> {
    let not_regular = || Error::invalid_file(format!("{shown} is not a regular file"));
    // Checked before the open as well, because opening a device can already have an effect.
    let before = canonical.symlink_metadata().map_err(|e| io_error(shown, &e))?;
    if !before.is_file() {
        return Err(not_regular());
    }
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NOCTTY)
        .open(canonical)
        .map_err(|e| io_error(shown, &e))?;
    let metadata = file.metadata().map_err(|e| io_error(shown, &e))?;
    if !metadata.is_file() {
        return Err(not_regular());
    }
    Ok((file, FileStamp::new(&metadata)))
}

/// Refuses the content of the file `name`, or its beginning, if that is a Git LFS pointer.
pub fn refuse_lfs_pointer(name: &str, content: &[u8]) -> Result<()> {
    if !content.starts_with(LFS_POINTER) {
        return Ok(());
    }
    Err(Error::invalid_file(format!(
        "{} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or fetch the model with \
         `hf download`",
        shown_name(name)
    )))
}

/// Returns the refusal of a model path that names a file.
fn is_a_file(path: &str) -> Error {
    let shown = shown_name(path);
    if Path::new(path).extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) {
        return Error::unsupported(format!(
            "{shown} is a GGUF file, which is not supported; pass the folder of the model's repository with \
             config.json and safetensors files"
        ));
    }
    Error::invalid_argument(format!("{shown} is a file; pass the folder that holds config.json"))
}

/// Finds the folder that `path` means: a folder, or the id of a repository (`org/name`) that the
/// local Hugging Face cache holds. Reads only the file system, never a network.
///
/// The cache is looked for as the Hugging Face libraries do: `HF_HUB_CACHE`,
/// `HUGGINGFACE_HUB_CACHE`, `HF_HOME/hub`, `XDG_CACHE_HOME/huggingface/hub`,
/// `~/.cache/huggingface/hub`, the first that is set.
pub fn resolve(path: &str) -> Result<PathBuf> {
    resolve_with(path, &|name| std::env::var_os(name))
}

/// Does the same as [`resolve`] with the environment as an argument, so that a test need not change
/// that of the process.
pub fn resolve_with(path: &str, variable: &dyn Fn(&str) -> Option<OsString>) -> Result<PathBuf> {
    if path.is_empty() {
        return Err(Error::invalid_argument("the model path is empty"));
    }
    if path.contains('\0') {
        return Err(Error::invalid_argument("the model path contains a NUL character"));
    }
    let direct = Path::new(path);
    match found(direct.metadata(), &shown_name(path))? {
        Some(metadata) if metadata.is_dir() => return Ok(direct.to_path_buf()),
        Some(_) => return Err(is_a_file(path)),
        None => {}
    }
    let not_found = |also: &str| {
        Error::new(ErrorKind::NotFound, format!("no folder {}{also}", shown_name(path)))
    };
    if !is_repo_id(path) {
        return Err(not_found(""));
    }
    let Some(cache) = hub_cache(variable) else {
        return Err(not_found(", and no local Hugging Face cache to look for it"));
    };
    let repo = cache.join(format!("models--{}", path.replace('/', "--")));
    let absent = || {
        let cache = cache.display();
        let cure = if path.contains('/') {
            format!("; `hf download {path}` fetches it")
        } else {
            String::new()
        };
        not_found(&format!(", and the local Hugging Face cache {cache} has none{cure}"))
    };
    if !is_folder(&repo)? {
        return Err(absent());
    }
    let repo_folder = Folder { path: repo.join("refs"), roots: canonical_folders(&[&repo])? };
    let hash = repo_folder
        .read_optional_file("main", MAX_REF_BYTES)?
        .and_then(|bytes| String::from_utf8(bytes).ok())
        .map(|text| text.trim().to_owned());
    if let Some(hash) = hash {
        if check_file_name(&hash).is_ok() {
            let snapshot = repo.join("snapshots").join(&hash);
            if is_folder(&snapshot)? {
                return Ok(snapshot);
            }
        }
    }
    Err(not_found(&format!(
        ", and {} has no snapshot that its refs/main names: the download was not completed; `hf download {path}` \
         goes on with it",
        repo.display()
    )))
}

/// Whether `path` has the form `name` or `org/name` with the characters that the Hub allows.
fn is_repo_id(path: &str) -> bool {
    let mut parts = path.split('/');
    let valid = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-'])
            && !part.ends_with(['.', '-'])
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    let first = parts.next().is_some_and(valid);
    let second = parts.next().is_none_or(valid);
    first && second && parts.next().is_none() && path.len() <= 96 && !path.contains("--")
}

/// Returns the folder of the local cache, from the environment.
fn hub_cache(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let home = || variable("HOME").filter(|v| !v.is_empty()).map(PathBuf::from);
    let folder = |name: &str| {
        let value = PathBuf::from(variable(name).filter(|v| !v.is_empty())?);
        // `~` is expanded as the Hugging Face libraries do, for a variable set without a shell.
        match value.strip_prefix("~") {
            Ok(rest) => home().map(|home| home.join(rest)),
            Err(_) => Some(value),
        }
    };
    folder("HF_HUB_CACHE")
        .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| folder("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub")))
        .or_else(|| home().map(|home| home.join(".cache/huggingface/hub")))
}

/// Returns the blob folders that belong to `canonical`, when it is a snapshot of the cache.
fn blob_folders(canonical: &Path) -> Result<Vec<PathBuf>> {
    let repo = canonical
        .parent()
        .filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"))
        .and_then(Path::parent)
        .filter(|repo| {
            repo.file_name().is_some_and(|name| name.to_string_lossy().starts_with("models--"))
        });
    let Some(repo) = repo else {
        return Ok(Vec::new());
    };
    let mut blobs = vec![repo.join("blobs")];
    blobs.extend(repo.parent().map(|cache| cache.join("blobs")));
    canonical_folders(&blobs)
}

/// Returns the canonical paths of those folders that exist.
fn canonical_folders<P: AsRef<Path>>(folders: &[P]) -> Result<Vec<PathBuf>> {
    let canonical = |folder: &P| {
        let shown = folder.as_ref().display();
        found(folder.as_ref().canonicalize(), &format!("folder {shown}")).transpose()
    };
    folders.iter().filter_map(canonical).collect()
}

/// Whether there is a folder at `path`.
fn is_folder(path: &Path) -> Result<bool> {
    let metadata = found(path.metadata(), &format!("folder {}", path.display()))?;
    Ok(metadata.is_some_and(|metadata| metadata.is_dir()))
}

/// Returns what the operating system found at a path, `None` if it says that nothing is there. Any
/// other failure says nothing about the path. `what` is for messages.
fn found<T>(outcome: io::Result<T>, what: &str) -> Result<Option<T>> {
    match outcome.map_err(|e| io_error(what, &e)) {
        Ok(thing) => Ok(Some(thing)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Refuses everything but the plain name of a file in the folder.
pub fn check_file_name(name: &str) -> Result<()> {
    let refuse = |why: &str| {
        Err(Error::invalid_file(format!("{} is not a plain file name: {why}", shown_name(name))))
    };
    if name.is_empty() {
        return refuse("it is empty");
    }
    if name.len() > MAX_FILE_NAME_BYTES {
        return refuse("it is longer than 255 bytes");
    }
    if name.contains(['/', '\\']) {
        return refuse("it contains a path separator");
    }
    if name.contains(|c: char| c.is_control()) {
        return refuse("it contains a control character");
    }
    let mut components = Path::new(name).components();
    match (components.next(), components.next()) {
        (Some(Component::Normal(_)), None) => Ok(()),
        _ => refuse("it leaves the folder"),
    }
}

/// Whether an error of this kind says something about the files of a folder, so that reading them
/// again would end the same way. Lack of memory or descriptors, a failing disk and missing
/// permissions do not.
pub fn is_lasting(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::InvalidFile
            | ErrorKind::Unsupported
            | ErrorKind::Template
            | ErrorKind::NotFound
            | ErrorKind::InvalidArgument
    )
}

/// Turns an error of the operating system into one that names `what`.
pub fn io_error(what: &str, error: &io::Error) -> Error {
    if error.raw_os_error() == Some(libc::ELOOP) {
        return Error::invalid_file(format!("{what} is a link that leads in a circle"));
    }
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Error::new(ErrorKind::NotFound, format!("{what} is not there"))
        }
        io::ErrorKind::OutOfMemory => {
            Error::new(ErrorKind::OutOfMemory, format!("not enough memory to read {what}"))
        }
        io::ErrorKind::PermissionDenied => {
            Error::new(ErrorKind::Io, format!("no permission to read {what}"))
        }
        _ => Error::new(ErrorKind::Io, format!("cannot read {what}: {error}")),
    }
}

/// Returns a name from a file or a caller in a form fit for a message: at most 120 characters, none
/// of them control characters.
pub fn shown_name(name: &str) -> String {
    const LIMIT: usize = 120;
    let mut shown: String =
        name.chars().take(LIMIT).map(|c| if c.is_control() { '\u{FFFD}' } else { c }).collect();
    if name.chars().nth(LIMIT).is_some() {
        shown.push_str("...");
    }
    shown
}
