"""A body on asyncio: ports, driver, fleet link, clock. It knows no vendor."""
