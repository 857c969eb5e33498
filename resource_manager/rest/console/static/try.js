// Send the requests of the API page's forms and show the answers.
(function () {
  "use strict";
  const root = document.body.dataset.root || "";
  for (const form of document.querySelectorAll("form.try")) {
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const query = new URLSearchParams();
      const headers = { "X-CSRF-Token": document.body.dataset.csrf };
      let path = form.dataset.path;
      for (const input of form.querySelectorAll("input[data-in]")) {
        if (!input.value) continue;
        if (input.dataset.in === "path") path = path.replace("{" + input.name + "}", encodeURIComponent(input.value));
        const values = "list" in input.dataset ? input.value.split(",") : [input.value];
        if (input.dataset.in === "query") values.forEach((value) => query.append(input.name, value.trim()));
        if (input.dataset.in === "header") headers[input.name] = input.value;
      }
      const text = form.querySelector("textarea");
      if (text) headers["Content-Type"] = "application/json";
      const answer = form.querySelector(".answer");
      answer.hidden = false;
      answer.textContent = "…";
      try {
        const started = performance.now();
        const response = await fetch(root + path + (query.size ? "?" + query : ""), {
          method: form.dataset.method, headers, body: text ? text.value : undefined, credentials: "same-origin",
        });
        let shown = await response.text();
        try { shown = JSON.stringify(JSON.parse(shown), null, 2); } catch (error) { /* no JSON: show the text unchanged */ }
        answer.textContent = response.status + " in " + Math.round(performance.now() - started) + " ms\n" + shown;
      } catch (error) {
        answer.textContent = "No answer: " + error;
      }
    });
  }
})();
