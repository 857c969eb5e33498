// Follow the output of a lease's job: the agent of its server sends what is new, from where the page has it.
(function () {
  "use strict";
  const root = document.body.dataset.root || "";
  const box = document.getElementById("output");
  const text = box.querySelector("pre");
  const choice = box.querySelector("select");
  const said = box.querySelector("p");
  const FIRST_BYTES = 16384, KEPT_CHARACTERS = 500000, PAUSE_MS = 1000, LONG_PAUSE_MS = 5000;
  const STEERING = /\x1b\[[0-9;:?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]/g;
  let known = "", key = "", offset = -FIRST_BYTES, over = false;

  function jobs() {
    const holder = document.querySelector("[data-jobs]");
    const told = holder ? holder.dataset.jobs : "[]";
    const found = JSON.parse(told);
    if (told !== known) {
      known = told;
      choice.replaceChildren(...found.map((job, rank) => new Option("Rank " + rank + ", " + job.server, job.key)));
      choice.hidden = found.length < 2;
      box.hidden = !found.length;
    }
    const job = found.find((each) => each.key === choice.value);
    if (job && job.key !== key) {
      key = job.key;
      offset = -FIRST_BYTES;
      over = false;
      text.textContent = "";
    }
    return job && { ...job, lease: holder.dataset.lease, mayBegin: "live" in holder.dataset };
  }

  async function read(job) {
    const query = new URLSearchParams({ server: job.server, key: job.key, offset, task_id: job.lease });
    const response = await fetch(root + "/api/jobs/output?" + query, { credentials: "same-origin" });
    const part = await response.json();
    if (job.key !== key) return 0;
    said.textContent = response.ok ? part.error || "" : part.detail || part.error || "No answer.";
    if (!response.ok || part.error) return LONG_PAUSE_MS;
    const bytes = Uint8Array.from(atob(part.text), (character) => character.charCodeAt(0));
    const fresh = new TextDecoder().decode(bytes).replace(/\r\n?/g, "\n").replace(STEERING, "");
    const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
    if (fresh) {
      text.append(fresh);
      text.normalize();
      if (text.textContent.length > KEPT_CHARACTERS) text.textContent = text.textContent.slice(-KEPT_CHARACTERS / 2);
    }
    if (atEnd) text.scrollTop = text.scrollHeight;
    offset = part.offset;
    const isAbsent = part.status.state === "absent";
    over = part.is_all && part.status.state !== "running" && !(isAbsent && job.mayBegin);
    if (over && !text.textContent) said.textContent = isAbsent ? "It is not kept any more." : "There is none.";
    return part.is_all ? PAUSE_MS : 0;
  }

  async function follow() {
    let pause = PAUSE_MS;
    const job = jobs();
    if (job && !over && !document.hidden) {
      try {
        pause = await read(job);
      } catch (error) {
        said.textContent = "No answer.";
        pause = LONG_PAUSE_MS;
      }
    }
    setTimeout(follow, pause);
  }

  choice.addEventListener("change", jobs);
  follow();
})();
