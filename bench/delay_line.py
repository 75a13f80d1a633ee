# SPDX-License-Identifier: Apache-2.0
"""Proxies on loopback that hold back what passes them, each way, for a time that is known: what a distance does to a
client, without its bandwidth. However much is on the way, nothing waits for anything else.

    with DelayLine() as line:
        port = line.before(server_port)
        line.seconds = 0.2
"""
import asyncio
import contextlib
import threading


class DelayLine:
    """seconds: each way, of what comes from now on."""

    def __init__(self):
        self.seconds = 0.0
        self._loop = asyncio.new_event_loop()
        self._servers = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def before(self, port):
        """A port whose connections lead to that one."""
        async def listen():
            async def serve(reader, writer):
                with contextlib.suppress(OSError, asyncio.CancelledError):  # an end is gone, or all ends
                    there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
                    await asyncio.gather(self._pass(reader, there_writer), self._pass(there_reader, writer))
            self._servers.append(await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20))
            return self._servers[-1].sockets[0].getsockname()[1]
        return asyncio.run_coroutine_threadsafe(listen(), self._loop).result()

    async def _pass(self, reader, writer):
        on_its_way = asyncio.Queue()

        async def deliver():
            while True:
                due, part = await on_its_way.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                if not part:
                    return writer.close()
                writer.write(part)
                await writer.drain()
        delivery = asyncio.create_task(deliver())
        part = b"-"
        while part:
            part = await reader.read(1 << 18)
            on_its_way.put_nowait((self._loop.time() + self.seconds, part))
        await delivery

    def __enter__(self):
        self._thread.start()
        return self

    async def _end(self):
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
