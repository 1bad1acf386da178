"use strict";
// Nothing is computed here but places in the figure: numbers and words are the report's own, looked up.
(() => {
  const data = JSON.parse(document.getElementById("live-data").textContent);
  const section = document.getElementById("convergence");
  const svg = section.querySelector("figure svg");
  const live = section.querySelector(".live");
  live.hidden = false;

  const parts = data.arms.map((_, arm) => svg.querySelectorAll(`[id^="convergence-arm${arm}-"]`));
  const make = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    svg.append(element);
    return element;
  };

  // Arms on and off.
  const rows = [...live.querySelectorAll("tbody tr")];
  const boxes = rows.map(row => row.querySelector("input"));
  const all = document.getElementById("live-all");
  const draw = () => {
    boxes.forEach((box, arm) => parts[arm].forEach(part => part.classList.toggle("off", !box.checked)));
    const on = boxes.filter(box => box.checked).length;
    all.checked = on === boxes.length;
    all.indeterminate = on > 0 && on < boxes.length;
  };
  boxes.forEach(box => box.addEventListener("change", draw));
  all.addEventListener("change", () => {
    for (const box of boxes) box.checked = all.checked;
    draw();
  });

  // The target.
  const slider = document.getElementById("live-target");
  if (slider) {
    const output = document.getElementById("live-loss");
    const note = document.getElementById("live-note");
    const back = document.getElementById("live-own");
    const own = svg.querySelectorAll('[id^="convergence-target"]');
    const atOwn = note.textContent;
    const lines = data.axes.map(axis => make("line", { class: "moved off", x1: axis.box[0], x2: axis.box[2] }));
    const move = () => {
      const at = Number(slider.value);
      const moved = at !== data.own;
      output.textContent = data.labels[at];
      slider.setAttribute("aria-valuetext", data.labels[at]);
      note.textContent = moved ? "A moved target: point estimates, without intervals." : atOwn;
      note.classList.toggle("moved", moved);
      back.disabled = !moved;
      rows.forEach((row, arm) => {
        data.moved[data.arms[arm]][at].forEach((text, i) => { row.cells[i + 1].textContent = text; });
      });
      own.forEach(part => part.classList.toggle("off", moved));
      lines.forEach((line, i) => {
        const { box, y } = data.axes[i];
        const share = (data.targets[at] - y[0]) / (y[1] - y[0]);
        const height = box[3] - share * (box[3] - box[1]);
        line.setAttribute("y1", height);
        line.setAttribute("y2", height);
        line.classList.toggle("off", !moved || share < 0 || share > 1);
      });
    };
    slider.addEventListener("input", move);
    back.addEventListener("click", () => {
      slider.value = data.own;
      move();
      slider.focus();
    });
    slider.value = data.own; // a browser may keep what it was before the page was loaded again
    move();
  }
  draw();

  // The value under the pointer.
  const tip = document.createElement("p");
  tip.className = "tip";
  tip.hidden = true;
  const figure = svg.closest("figure");
  figure.append(tip);
  const dot = make("circle", { class: "dot off", r: 3.2 });
  const reach = 14;
  let picked = -1;
  const pick = arm => {
    if (arm === picked) return;
    picked = arm;
    parts.forEach((own, i) => own.forEach(part => part.classList.toggle("faded", arm >= 0 && i !== arm)));
  };
  const leave = () => {
    tip.hidden = true;
    dot.classList.add("off");
    pick(-1);
  };
  const nearest = (x, y) => {
    const axis = data.axes.find(({ box }) => x >= box[0] && x <= box[2] && y >= box[1] && y <= box[3]);
    if (!axis) return null;
    const { box } = axis;
    const wide = (box[2] - box[0]) / (axis.x[1] - axis.x[0]);
    const high = (box[3] - box[1]) / (axis.y[1] - axis.y[0]);
    let best = null;
    let least = reach * reach;
    for (const [arm, seed, times, losses] of data.runs) {
      if (!boxes[arm].checked) continue;
      times.forEach((tokens, i) => {
        const across = box[0] + (tokens - axis.x[0]) * wide;
        const down = box[3] - (losses[i] - axis.y[0]) * high;
        const far = (across - x) ** 2 + (down - y) ** 2;
        if (far < least && down >= box[1] && down <= box[3]) {
          least = far;
          best = { arm, seed, tokens, loss: losses[i], across, down };
        }
      });
    }
    return best;
  };
  const point = event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const found = nearest(at.x, at.y);
    if (!found) return leave();
    pick(found.arm);
    dot.setAttribute("cx", found.across);
    dot.setAttribute("cy", found.down);
    dot.classList.remove("off");
    tip.textContent = `${data.arms[found.arm]}, seed ${found.seed}: ${found.loss.toFixed(4)} ${data.unit} `
      + `after ${found.tokens.toLocaleString("en")} tokens`;
    tip.hidden = false;
    const room = figure.getBoundingClientRect();
    const left = Math.min(event.clientX - room.left + 14, room.width - tip.offsetWidth);
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${event.clientY - room.top + 18}px`;
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", leave);
  document.addEventListener("keydown", event => { if (event.key === "Escape") leave(); });
})();
