// The trace as it arrives, and as the views read it.

const LASTING = [
  "running_queue",
  "waiting_queue",
  "free_after_schedule",
  "free_after_update",
  "free_queue",
  "refs",
  "cached",
];

const ids = (runs) =>
  runs
    .split(" ")
    .filter(Boolean)
    .flatMap((run) => {
      const [first, last] = run.split("-").map(Number);
      return Array.from({ length: (last ?? first) - first + 1 }, (_, i) => first + i);
    });
const table = (packed) =>
  typeof packed === "number" ? { counted: packed, groups: [] } : { groups: packed.split("|").map(ids) };

// Every step in full: what did not change comes from the step before.
const unfold = (trace) => {
  let last = { tables: new Map() };
  return trace.steps.map((step) => {
    const tables = new Map(last.tables);
    for (const [name, packed] of Object.entries(step.tables ?? {}))
      packed === null ? tables.delete(name) : tables.set(name, table(packed));
    const full = {
      arrived: [],
      aborted: [],
      new: [],
      resumed: [],
      preempted: [],
      running_queue: [],
      waiting_queue: [],
    };
    for (const field of LASTING) if (field in last) full[field] = last[field];
    last = Object.assign(full, step, { before: last.tables, tables });
    for (const field of ["scheduled", "admitted_computed", "sampled", "finished"])
      last[field] = new Map(Object.entries(step[field] ?? {}));
    return last;
  });
};

// The state after schedule(), or after the whole step: the first of these that holds.
const stateOf = (step, name, whole = true) => {
  if (whole && step.finished.has(name)) return "fin";
  if (step.preempted.includes(name)) return "pre";
  if (step.resumed.includes(name)) return "res";
  if (step.new.includes(name)) return "new";
  if (step.scheduled.has(name)) return "run";
  if (step.waiting_queue.includes(name)) return "wait";
  if (step.running_queue.includes(name)) return "idle";
  return step.aborted.includes(name) ? "abort" : "gone";
};

const total = (step) => [...step.scheduled.values()].reduce((a, b) => a + b, 0);
// How many entries of its block table a request found in the prefix cache when it was admitted in this step.
const foundBlocks = (step, name, size) => Math.floor((step.admitted_computed.get(name) ?? 0) / (size ?? Infinity));
const largest = (numbers) => numbers.reduce((a, b) => (b > a ? b : a), 0);

// The parts that there are, in one line.
const sentence = (parts) => parts.filter(Boolean).join("; ");
