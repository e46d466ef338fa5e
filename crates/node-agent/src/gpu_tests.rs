//! Tests of [`crate::gpu`] on the node of [`super`], with real pages and reports.

use super::*;
use gainshare_kube_api::gpu_pacing::GpuPacing;
use gainshare_kube_api::wire::PolicyKind;
use gainshare_page::{
    GPU_ON, GPU_VARIABLE, LIBRARY_FILE, Orders, PAGE_BYTES, PAGE_VARIABLE, Report, ReportWord, SWITCH_VARIABLE,
    WHOLE_GPU, decode, decode_report, empty_report, encode,
};
use std::process::{Child, Command, Stdio};

/// A GPU's place on the bus.
const GPU: u64 = 5;

/// A program that fills its GPU: 1,000 launches a second, and it waits for nine tenths of the time.
const LAUNCHES_PER_MS: u64 = 1;
const WAITED_NS_PER_US: u64 = 900;

impl World {
    /// Pods with the library and these floors, whose GPU work is to be paced, under the policy of equal shares.
    fn with_floors(pods: &[(&str, f64)]) -> World {
        let mut w = World::new();
        for (name, floor) in pods {
            w.add(name);
            let pod = w.pods.last_mut().unwrap();
            (pod.gpu, pod.settings.policy, pod.settings.floor) = (true, PolicyKind::equal(), *floor);
            std::fs::create_dir_all(w.page(name).parent().unwrap()).unwrap();
            std::fs::write(w.page(name), encode(&Orders { blas_may_grow: true, ..Orders::default() }, 1)).unwrap();
            w.report(name, &[]);
        }
        w.node.teams = Teams::at(&w.dir.path().join("pods")).unwrap();
        w.list();
        w
    }

    fn page(&self, name: &str) -> PathBuf {
        let volume = format!("pods/uid-{name}/volumes/kubernetes.io~empty-dir/gainshare-page");
        self.dir.path().join(volume).join("page")
    }

    fn report_file(&self, name: &str) -> PathBuf {
        self.page(name).with_file_name("page.report")
    }

    /// Writes what the library of a pod reports.
    fn report(&self, name: &str, words: &[(ReportWord, u64)]) {
        let mut bytes = empty_report();
        for (word, value) in words {
            bytes.as_chunks_mut::<8>().0[*word as usize] = value.to_ne_bytes();
        }
        std::fs::write(self.report_file(name), bytes).unwrap();
    }

    /// A second passes. These pods launch work on these GPUs and mostly wait for it; `gpus` is what the library counts.
    fn compute_on(&mut self, work: &[(&str, u64)], gpus: u64) {
        for (name, gpu) in work {
            let words = [
                (ReportWord::Programs, 1),
                (ReportWord::Launches, self.clock / 1000 * LAUNCHES_PER_MS),
                (ReportWord::WaitedNs, self.clock * WAITED_NS_PER_US),
                (ReportWord::Gpu, *gpu),
                (ReportWord::Gpus, gpus),
            ];
            self.report(name, &words);
        }
        (0..2).for_each(|_| drop(self.tick()));
    }

    fn compute(&mut self, names: &[&str]) {
        let work: Vec<(&str, u64)> = names.iter().map(|name| (*name, GPU)).collect();
        self.compute_on(&work, 1);
    }

    /// What the page of a pod says about its GPU.
    fn orders(&self, name: &str) -> (u32, u32) {
        let bytes: [u8; PAGE_BYTES] = std::fs::read(self.page(name)).unwrap().try_into().unwrap();
        let orders = decode(&bytes).unwrap();
        assert!(orders.blas_may_grow && orders.team > 0, "the rest of the page is kept: {orders:?}");
        (orders.gpu_share, orders.gpu_jobs)
    }

    fn pacing(&self, name: &str) -> Option<GpuPacing> {
        self.state(name).gpu
    }

    fn pod(&mut self, name: &str) -> &mut PodOnNode {
        self.pods.iter_mut().find(|pod| pod.name == name).unwrap()
    }
}

/// The pace of a pod with a quarter of the GPU beside another one, which works half of the time.
fn is_a_quarter((part, jobs): (u32, u32)) -> bool {
    part.abs_diff(WHOLE_GPU / 4) < WHOLE_GPU / 100 && jobs == 2
}

#[test]
fn the_larger_share_of_a_gpu_is_not_paced() {
    let mut w = World::with_floors(&[("large", 0.75), ("small", 0.0)]);
    (0..3).for_each(|_| w.compute(&["large", "small"]));
    assert_eq!(w.orders("large"), (0, 2));
    assert!(is_a_quarter(w.orders("small")), "{:?}", w.orders("small"));
    assert_eq!(w.pacing("large"), Some(GpuPacing::Unpaced));
    assert_eq!(w.pacing("small"), Some(GpuPacing::Paced { percent: 25 }));
    // A pod that cannot be resized is paced all the same, one that is only measured is not.
    let blocked = ResizeObstacle { reason: "BestEffort".into(), message: "it requests nothing".into() };
    w.pod("small").blocked = Some(blocked);
    w.list();
    w.compute(&["large", "small"]);
    assert!(is_a_quarter(w.orders("small")), "{:?}", w.orders("small"));
    w.pod("small").blocked = Some(ResizeObstacle::watched("TFJob/na"));
    w.list();
    w.compute(&["large", "small"]);
    assert_eq!((w.orders("large"), w.orders("small"), w.pacing("small")), ((0, 1), (0, 0), None));
}

#[test]
fn a_pod_alone_on_its_gpu_is_not_paced() {
    let mut w = World::with_floors(&[("a", 0.75), ("b", 0.0), ("c", 0.0)]);
    (0..3).for_each(|_| w.compute_on(&[("a", GPU), ("b", GPU + 1)], 1));
    assert_eq!(["a", "b", "c"].map(|name| w.orders(name)), [(0, 1), (0, 1), (0, 0)]);
    assert_eq!((w.pacing("a"), w.pacing("c")), (Some(GpuPacing::Unpaced), Some(GpuPacing::NotLoaded)));
    // A pod of another policy on the same GPU slows nobody.
    let mut w = World::with_floors(&[("a", 0.75), ("b", 0.0)]);
    w.pod("a").policy = "other".into();
    w.list();
    (0..3).for_each(|_| w.compute(&["a", "b"]));
    assert_eq!([w.orders("a"), w.orders("b")], [(0, 1); 2]);
}

#[test]
fn a_silent_pod_leaves_its_share() {
    let mut w = World::with_floors(&[("large", 0.75), ("small", 0.0)]);
    (0..3).for_each(|_| w.compute(&["large", "small"]));
    assert!(is_a_quarter(w.orders("small")));
    w.compute(&["small"]);
    assert_eq!((w.orders("large"), w.orders("small")), ((0, 0), (0, 1)), "it launched nothing for a second");
    assert_eq!(w.pacing("small"), Some(GpuPacing::Paced { percent: 25 }), "a short pause is no news");
    w.compute(&["large", "small"]);
    assert!(is_a_quarter(w.orders("small")), "its share is known as soon as it goes on: {:?}", w.orders("small"));
    (0..62).for_each(|_| w.compute(&["small"]));
    assert_eq!((w.orders("small"), w.pacing("small")), ((0, 1), Some(GpuPacing::Unpaced)));
    // A pod that is gone leaves its share, too.
    w.compute(&["large", "small"]);
    assert!(is_a_quarter(w.orders("small")));
    w.pods.retain(|pod| pod.name != "large");
    w.list();
    w.compute(&["small"]);
    assert_eq!(w.orders("small"), (0, 1));
}

#[test]
fn pods_on_several_gpus_are_not_paced() {
    let mut w = World::with_floors(&[("large", 0.75), ("ranks", 0.0)]);
    for _ in 0..3 {
        w.compute_on(&[("ranks", GPU)], 2);
        w.compute(&["large"]);
    }
    assert_eq!((w.orders("large"), w.orders("ranks")), ((0, 1), (0, 0)));
    assert_eq!(w.pacing("ranks"), Some(GpuPacing::SeveralGpus));
}

#[test]
fn a_pod_whose_work_is_not_paced_says_why() {
    let mut w = World::with_floors(&[("idle", 0.0), ("bare", 0.0), ("bad", 0.0), ("quiet", 0.0), ("own", 0.0)]);
    std::fs::remove_dir_all(w.page("bare").parent().unwrap()).unwrap();
    std::fs::write(w.page("bad"), "no page").unwrap();
    w.report("idle", &[(ReportWord::Programs, 2)]);
    (w.pod("quiet").gpu, w.pod("own").gpu) = (false, false);
    w.list();
    // The library of `own` catches launches because its author set the variable.
    (0..3).for_each(|_| w.compute(&["own", "bad"]));
    let expected = [
        Some(GpuPacing::NoLaunches),
        Some(GpuPacing::NoLibrary),
        Some(GpuPacing::PageRefused),
        None,
        Some(GpuPacing::Unpaced),
    ];
    assert_eq!(["idle", "bare", "bad", "quiet", "own"].map(|name| w.pacing(name)), expected);
    assert_eq!(std::fs::read(w.page("bad")).unwrap(), b"no page");
    // An agent that may not write pages.
    let mut w = World::with_floors(&[("a", 0.0)]);
    w.node.teams = Teams::default();
    (0..2).for_each(|_| w.compute(&["a"]));
    assert_eq!(w.pacing("a"), Some(GpuPacing::PagesOff));
}

#[test]
fn what_a_pod_claims_takes_nothing_from_the_floor_of_another() {
    let mut w = World::with_floors(&[("honest", 0.75), ("liar", 0.0)]);
    let most = [
        (ReportWord::Launches, u64::MAX),
        (ReportWord::Pauses, u64::MAX),
        (ReportWord::PausedNs, u64::MAX),
        (ReportWord::WaitedNs, u64::MAX),
    ];
    let mut whole = empty_report();
    whole[16..].fill(0xff);
    for round in 0..24 {
        let place = if round % 2 == 0 { GPU } else { u64::MAX };
        w.report("liar", &[&most[..round % 5], &[(ReportWord::Gpu, place), (ReportWord::Gpus, 1)][..]].concat());
        match round % 7 {
            4 => std::fs::write(w.report_file("liar"), whole).unwrap(),
            5 => std::fs::write(w.report_file("liar"), [7; PAGE_BYTES]).unwrap(),
            6 => std::fs::write(w.report_file("liar"), "short").unwrap(),
            _ => {}
        }
        w.compute(&["honest"]);
        let (part, jobs) = w.orders("honest");
        assert!(part == 0 && (1..=2).contains(&jobs), "{round}: {part} {jobs}");
        let (part, _) = w.orders("liar");
        assert!(part < WHOLE_GPU, "{round}: {part}");
    }
}

/// A program that launches on the driver of the library's own tests until it is dropped.
struct Launches(Child);

impl Launches {
    fn start(w: &World, name: &str, built: &[PathBuf; 2]) -> Launches {
        let [program, driver] = built;
        let mut child = Command::new(program)
            .arg(driver)
            .env_remove(SWITCH_VARIABLE)
            .env("LD_PRELOAD", library())
            .env(PAGE_VARIABLE, w.page(name))
            .env(GPU_VARIABLE, GPU_ON)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.as_mut().unwrap().write_all(b"r 3\nl 1000000000\n").unwrap();
        Launches(child)
    }
}

impl Drop for Launches {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The library that was built with these tests.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().skip(1).take(2);
    let built = folders.map(|folder| folder.join(LIBRARY_FILE)).filter(|file| file.is_file());
    built
        .max_by_key(|file| file.metadata().unwrap().modified().unwrap())
        .expect("build the library first: cargo build --release -p gainshare-inside")
}

fn compile(to: &Path, source: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inside/tests").join(source);
    let built = Command::new("cc").args(["-O1", "-o"]).args([to, &source]).args(flags).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    to.to_owned()
}

#[test]
fn launches_of_real_programs_are_paced() {
    let mut w = World::with_floors(&[("large", 0.75), ("small", 0.0)]);
    let built = [
        compile(&w.dir.path().join("launches"), "launches.c", &["-ldl"]),
        compile(&w.dir.path().join("libdriver.so"), "fake_cuda.c", &["-shared", "-fPIC"]),
    ];
    let large = Launches::start(&w, "large", &built);
    let _small = Launches::start(&w, "small", &built);
    // The node's clock goes as fast as that of the programs.
    let wait_until = |w: &mut World, what: &str, holds: &dyn Fn(&World) -> bool| {
        for _ in 0..60 {
            std::thread::sleep(Duration::from_millis(500));
            w.tick();
            if holds(w) {
                return;
            }
        }
        panic!("{what} did not come about: {:?} {:?}", w.orders("large"), w.orders("small"));
    };
    let report =
        |w: &World, name: &str| -> Report { decode_report(&std::fs::read(w.report_file(name)).unwrap()).unwrap() };
    wait_until(&mut w, "a pace", &|w| w.pacing("small").map(GpuPacing::kind) == Some(GpuPacing::Paced { percent: 0 }));
    assert!(report(&w, "small").pauses > 0, "{:?}", report(&w, "small"));
    assert_eq!(report(&w, "large").pauses, 0, "the larger share is not paced");
    // The driver does its work at once, so nobody waits for it: then nobody is to pause either.
    wait_until(&mut w, "slack", &|w| w.orders("small") == (0, 2));
    drop(large);
    wait_until(&mut w, "the end of the other one", &|w| w.orders("small") == (0, 1));
}
