//! Images made in memory from a program of this machine, without a registry: a tar archive handed to the engine as
//! `docker import` does.

use bollard::Docker;
use bollard::errors::Error;
use bollard::query_parameters::CreateImageOptions;
use bytes::Bytes;
use futures_util::StreamExt;

/// Makes the image `name` (as in `repository:tag`) from a tar archive of a root file system.
pub(crate) async fn import(docker: &Docker, rootfs_tar: Vec<u8>, name: &str) -> Result<(), Error> {
    let (repo, tag) = name.rsplit_once(':').unwrap_or((name, "latest"));
    let options = CreateImageOptions {
        from_src: Some("-".to_owned()),
        repo: Some(repo.to_owned()),
        tag: Some(tag.to_owned()),
        ..Default::default()
    };
    let body = bollard::body_full(Bytes::from(rootfs_tar));
    let mut progress = std::pin::pin!(docker.create_image(Some(options), Some(body), None));
    while let Some(step) = progress.next().await {
        step?;
    }
    Ok(())
}

/// A root file system of one static shell and its commands.
pub(crate) fn busybox_rootfs() -> Vec<u8> {
    let program = ["/bin/busybox", "/usr/bin/busybox"].iter().find_map(|path| std::fs::read(path).ok());
    let program = program.expect("this test needs a static shell: apt-get install busybox-static");
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o755);
    header.set_size(program.len() as u64);
    tar.append_data(&mut header, "bin/busybox", program.as_slice()).unwrap();
    for applet in ["sh", "sleep", "cat", "dd", "tail", "head", "id", "ls", "env"] {
        let mut link = tar::Header::new_gnu();
        link.set_entry_type(tar::EntryType::Symlink);
        link.set_size(0);
        tar.append_link(&mut link, format!("bin/{applet}"), "busybox").unwrap();
    }
    let mut tmp = tar::Header::new_gnu();
    tmp.set_entry_type(tar::EntryType::Directory);
    tmp.set_mode(0o1777);
    tmp.set_size(0);
    tar.append_data(&mut tmp, "tmp/", std::io::empty()).unwrap();
    tar.into_inner().unwrap()
}
