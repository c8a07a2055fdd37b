// Search runs in a worker, which browsers refuse to pages that are opened from a disk. There, and only there,
// Worker is replaced by one that runs its script in a hidden frame and speaks through the frame's window.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.waiting = []
      this.scope = frame.contentWindow
      this.scope.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      this.scope.importScripts = (...urls) => urls.reduce(
        (done, each) => done.then(() => this.load(each)), Promise.resolve())
      this.load(url).then(() => {
        const waiting = this.waiting
        this.waiting = null
        for (const data of waiting) this.deliver(data)
      })
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script")
        script.src = new URL(url, location.href)
        script.onload = resolve
        script.onerror = reject
        this.scope.document.body.appendChild(script)
      })
    }
    deliver(data) {
      this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }))
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.deliver(data)
    }
    terminate() {
      if (this.scope.frameElement) this.scope.frameElement.remove()
    }
  }
}
